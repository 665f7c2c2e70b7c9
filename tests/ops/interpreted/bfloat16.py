"""Makes bfloat16 in Triton's interpreter what it is on a GPU, so that the same error limits hold.

The interpreter (3.6 and 3.7) keeps bfloat16 as its bits in uint16. It multiplies those bits as whole numbers in
`tl.dot`, and it cuts float32 to bfloat16 off where a GPU rounds to the nearest even.
"""

from typing import Any

import numpy as np
import pytest
import torch


def _to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def make_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the interpreter's casts between float32 and bfloat16 and its product of bfloat16 matrices."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    other_cast, other_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast(self: Any, source: Any, target_type: Any) -> Any:
        kinds = (source.dtype.scalar, target_type.scalar)
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(_to_float32(source.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(_to_bfloat16(source.data), tl.bfloat16)
        # Through float32, or the bits would be cast as whole numbers.
        assert tl.bfloat16 not in kinds, f"cast {kinds}: not provided here"
        return other_cast(self, source, target_type)

    def dot(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return other_dot(self, a, b, total, *options)
        assert b.dtype.scalar == tl.bfloat16 and total.dtype.scalar == tl.float32
        return TensorHandle(np.matmul(_to_float32(a.data), _to_float32(b.data)) + total.data, tl.float32)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
