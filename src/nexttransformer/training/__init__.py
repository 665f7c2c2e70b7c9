"""Training: the loop and what keeps a run alive (run folder, events, checkpoints, lock, stop)."""
