"""Compiles our Triton kernels for Hopper without a GPU, as their wrappers launch them at the formal shapes.

    python tests/ops/interpreted/compile_for_hopper.py [FILE]

prints what every kernel takes of a streaming multiprocessor, and writes it with the PTX code to FILE as JSON. The
wrappers run on CPU tensors; a launch compiles the kernel and does not start it, so that arguments, specialization and
options are the product's own. Run it without TRITON_INTERPRET.
"""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from nexttransformer.ops.convolved_heads import fused as convolved_heads
from nexttransformer.ops.cross_entropy import fused as cross_entropy
from nexttransformer.ops.lookup_gradient import fused as lookup_gradient
from nexttransformer.ops.lookup_gradient.order import order_tokens
from nexttransformer.ops.relu_squared import fused as relu_squared
from nexttransformer.ops.relu_squared.tiles import tiles
from nexttransformer.ops.rotary_heads import fused as rotary_heads
from nexttransformer.ops.sinkhorn import fused as sinkhorn
from nexttransformer.ops.stream_write import fused as stream_write
from nexttransformer.protocol import get_protocol

_NUM_MULTIPROCESSORS = 132
# A few tokens stand for the formal number. Only two facts enter the compiled code: it is divisible by 16, and no
# smaller than the number of multiprocessors.
_NUM_TOKENS = 144


class Compiled(NamedTuple):
    """What one compiled kernel takes: per thread (registers, spills) and per program (shared memory)."""

    kernel: str
    variant: str
    num_warps: int
    num_registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    ptx: str


class _HopperDriver:
    """The little that Triton asks of a driver to compile: one device of compute capability 9.0."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _read_log(log: str, pattern: str) -> int:
    found = re.findall(pattern, log)
    assert len(found) == 1, f"{pattern}: expected once in ptxas's report:\n{log}"
    return int(found[0])


def _launches(run: Callable[[], Any]) -> list[tuple[str, Any, str]]:
    """Runs a wrapper; returns (kernel name, compiled kernel, ptxas's report) for every launch in it."""
    launches = []
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        # Two variants may share a kernel, which a function keeps; compiled again, ptxas reports again.
        self.device_caches.clear()
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            compiled = launch(self, *args, grid=grid, warmup=True, **options)
        launches.append((self.__name__.strip("_"), compiled, log.getvalue()))

    with mock.patch.object(JITFunction, "run", compile_only), torch.no_grad():
        run()
    return launches


def _draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _rotary_wrappers(num_heads: int, head_dim: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    width, tokens = num_heads * head_dim, _NUM_TOKENS
    qkv, cos = _draw(1, tokens, 3 * width), _draw(tokens, head_dim // 2)
    head = _draw(1, tokens, num_heads, head_dim)
    for has_row in (True, False):
        row = _draw(1, tokens, width) if has_row else None
        factor = _draw(1, tokens, num_heads, dtype=torch.float32) if has_row else None
        name = f"K {head_dim}, {'with' if has_row else 'no'} value row"
        given = (qkv, cos, cos, row, factor, num_heads, 1.2)
        yield f"rotary_heads, {name}", lambda given=given: rotary_heads._forward(*given)
        yield (f"rotary_heads, {name}", lambda given=given: rotary_heads._backward(head, head, head, *given))


def _convolved_wrappers(num_heads: int, head_dim: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    width, tokens = num_heads * head_dim, _NUM_TOKENS
    qkv, taps = _draw(1, tokens, 3 * width), _draw(3 * width, 4, dtype=torch.float32)
    head = _draw(1, tokens, num_heads, head_dim)
    for has_row in (True, False):
        row = _draw(1, tokens, width) if has_row else None
        factor = _draw(1, tokens, num_heads, dtype=torch.float32) if has_row else None
        name = f"convolved_heads, K {head_dim}, {'with' if has_row else 'no'} value row"
        given = (qkv, taps, row, factor, num_heads)
        yield name, lambda given=given: convolved_heads._forward(*given)
        yield name, lambda given=given: convolved_heads._backward(head, head, head, *given)


def _stream_wrappers(num_streams: int, width: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    streams, y = _draw(1, _NUM_TOKENS, num_streams, width), _draw(1, _NUM_TOKENS, width)
    post = _draw(1, _NUM_TOKENS, num_streams, dtype=torch.float32)
    one = _draw(dtype=torch.float32)
    for mixes in (True, False):
        res = _draw(1, _NUM_TOKENS, num_streams, num_streams, dtype=torch.float32) if mixes else None
        for scales in (True, False):
            given = (streams, y, res, post, *((one, one, y) if scales else (None, None, None)))
            name = f"stream_write, N {num_streams}{', mixing' if mixes else ''}{', scaling' if scales else ''}"
            yield name, lambda given=given: stream_write._forward(*given)
            yield name, lambda given=given: stream_write._backward(streams, *given)


def _sinkhorn_wrappers(num_streams: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    logits = _draw(1, _NUM_TOKENS, num_streams, num_streams, dtype=torch.float32)
    yield f"sinkhorn, N {num_streams}", lambda: sinkhorn._forward(logits, 20, 1e-6)
    yield f"sinkhorn, N {num_streams}", lambda: sinkhorn._backward(logits, logits, 20, 1e-6)


def _lookup_wrappers(width: int, vocab_size: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    gradient, order = _draw(_NUM_TOKENS, width), order_tokens(torch.arange(_NUM_TOKENS), vocab_size)
    yield f"lookup_gradient, V {vocab_size}", lambda: lookup_gradient.lookup_gradient_fused(gradient, order)


def _relu_squared_wrappers(width: int, mlp_width: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    a_ND, aux_NF = _draw(_NUM_TOKENS, width), _draw(_NUM_TOKENS, mlp_width)
    for is_backward in (False, True):
        weight = _draw(width, mlp_width) if is_backward else _draw(mlp_width, width)
        aux = aux_NF if is_backward else None
        for tile in tiles(is_backward=is_backward):
            given = (a_ND, weight, mlp_width, aux, tile)
            name = "x".join(map(str, tile[:3])) + f", group {tile.group}, stages {tile.num_stages}"
            name += ", specialized" if tile.is_specialized else ""
            label = f"relu_squared {'backward' if is_backward else 'forward'}, {name}"
            yield label, lambda given=given: relu_squared.product(*given)


def _cross_entropy_wrappers(width: int, vocab_size: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    h_ND, weight_VD = _draw(_NUM_TOKENS, width), _draw(vocab_size, width)
    targets = torch.zeros(_NUM_TOKENS, dtype=torch.int64)
    for with_gradient in (True, False):
        given = (h_ND, weight_VD, targets, 15.0, with_gradient)
        yield (
            f"cross_entropy, V {vocab_size}, {'with' if with_gradient else 'no'} gradient",
            lambda given=given: cross_entropy._forward(*given),
        )


def compile_all() -> list[Compiled]:
    """Compiles every kernel at the shapes of formal-v1; head dim 64 too."""
    formal = get_protocol("formal-v1")
    width = formal.width
    wrappers = [
        *_rotary_wrappers(formal.num_heads, formal.head_dim),
        *_rotary_wrappers(2 * formal.num_heads, 64),
        *_convolved_wrappers(formal.num_heads, formal.head_dim),
        *_convolved_wrappers(2 * formal.num_heads, 64),
        *_stream_wrappers(4, width),
        *_sinkhorn_wrappers(4),
        *_lookup_wrappers(width, formal.vocab_size),
        *_relu_squared_wrappers(width, formal.mlp_width),
        *_cross_entropy_wrappers(width, formal.vocab_size),
    ]
    processors = mock.Mock(multi_processor_count=_NUM_MULTIPROCESSORS, major=9)
    compiled = []
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: processors),
        knobs.nvidia.scope(),
        knobs.compilation.scope(),
    ):
        knobs.nvidia.dump_ptxas_log = True
        # A kernel from Triton's cache comes without ptxas's report.
        knobs.compilation.always_compile = True
        driver.set_active(_HopperDriver())  # pyright: ignore[reportArgumentType]
        for variant, run in wrappers:
            launches = _launches(run)
            assert launches, f"{variant}: launches no kernel"
            for name, kernel, log in launches:
                facts = (
                    _read_log(log, r"Used (\d+) registers"),
                    sum(_read_log(log, rf"(\d+) bytes spill {kind}") for kind in ("stores", "loads")),
                    _read_log(log, r"(\d+) bytes stack frame"),
                )
                metadata = kernel.metadata
                compiled.append(Compiled(name, variant, metadata.num_warps, *facts, metadata.shared, kernel.asm["ptx"]))
    return compiled


def table(compiled: list[Compiled]) -> str:
    """Returns the figures as text, a line for each kernel."""
    width = max(len(one.variant) for one in compiled)
    lines = [f"{'kernel':<16} {'variant':<{width}} warps registers spills stack shared"]
    for one in compiled:
        figures = (
            f"{one.num_warps:>5} {one.num_registers:>9} {one.spill_bytes:>6} {one.stack_bytes:>5} {one.shared_bytes:>6}"
        )
        lines.append(f"{one.kernel:<16} {one.variant:<{width}} {figures}")
    return "\n".join([f"Triton {triton.__version__}, sm_90; registers and spilled bytes per thread", *lines])


if __name__ == "__main__":
    kernels = compile_all()
    print(table(kernels))
    for file in sys.argv[1:]:
        Path(file).write_text(json.dumps([one._asdict() for one in kernels]))
