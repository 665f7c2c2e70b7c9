"""Runs our Triton kernels on CPU tensors in Triton's interpreter.

    TRITON_INTERPRET=1 python -m pytest -m interpret tests/ops/interpreted

The interpreter executes a kernel's programs one after the other in NumPy. It sees wrong indices, masks and formulas;
races between threads, layouts and a compiler's mistakes it does not (test_hopper_code.py looks at compiled code, the
tests marked gpu and the self-check of every run at the rest).
"""

import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch

from tests.ops.interpreted.bfloat16 import make_exact

OPERATIONS = (
    *("rotary_heads", "convolved_heads", "relu_squared", "cross_entropy"),
    *("stream_write", "sinkhorn", "lookup_gradient"),
)


@pytest.fixture(scope="session", autouse=True)
def needs_interpreter() -> None:
    """Skips, with the reason, where Triton is absent or would not interpret."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed; .ci/run installs it.")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1 from the start of the process, as .ci/run sets it.")


def is_fused(op: str, x: torch.Tensor, *, item_bytes: int = 2) -> bool:
    """As `backends.is_fused`, for CPU tensors too."""
    return x.element_size() == item_bytes


@pytest.fixture(autouse=True)
def interpreter(needs_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run interpreted, and the public functions take their fused form for CPU tensors."""
    make_exact(monkeypatch)
    # Fewer programs than tiles, so that one program makes several.
    device = SimpleNamespace(multi_processor_count=3, major=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    for op in OPERATIONS:
        monkeypatch.setattr(f"nexttransformer.ops.{op}.is_fused", is_fused)
    # Small sizes make several programs.
    from nexttransformer.ops.convolved_heads import fused

    monkeypatch.setattr(fused, "_TOKENS", 16)
    monkeypatch.setattr(fused, "_LENGTH", 9)
