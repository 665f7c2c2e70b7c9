"""Sequence operations: `naive.py` is the truth and the CPU path, `fused.py` the fast CUDA path."""
