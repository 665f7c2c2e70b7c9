"""Our kernels compiled for Hopper at the formal shapes: they fit, spill nothing, and keep reads before overwrites."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpret

# Shared memory of a Hopper multiprocessor; 1 KiB for each program on it is reserved.
SHARED_BYTES, RESERVED_BYTES = 228 * 1024, 1024
REGISTERS = 65_536


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict]]:
    """Returns the table and the facts of every kernel, compiled in a process where Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folder = tmp_path_factory.mktemp("compiled")
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    script = Path(__file__).parent / "compile_for_hopper.py"
    file = folder / "kernels.json"
    result = subprocess.run(
        [sys.executable, str(script), str(file)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads(file.read_text())


def test_every_kernel_fits_and_spills_nothing(report: tuple[str, list[dict]]) -> None:
    from nexttransformer.ops.relu_squared.tiles import tiles

    text, kernels = report
    print(text)
    numbers = Counter(kernel["kernel"] for kernel in kernels)
    candidates = [*tiles(is_backward=False), *tiles(is_backward=True)]
    num_specialized = sum(tile.is_specialized for tile in candidates)
    assert numbers == {
        # Heads of two sizes, with and without value row; backward the convolved values have a launch of their own.
        "rotary_forward_kernel": 4,
        "rotary_backward_kernel": 4,
        "convolved_forward_kernel": 4,
        "convolved_backward_kernel": 8,
        # Four kinds of writes.
        "stream_forward_kernel": 4,
        "stream_backward_kernel": 2,
        "stream_mixing_backward_kernel": 2,
        "sinkhorn_forward_kernel": 1,
        "sinkhorn_backward_kernel": 1,
        "lookup_gradient_kernel": 1,
        "product_kernel": len(candidates) - num_specialized,
        "specialized_product_kernel": num_specialized,
        "softcap_kernel": 2,
    }
    wrong = []
    for kernel in kernels:
        registers = kernel["num_registers"] * 32 * kernel["num_warps"]
        fits = kernel["shared_bytes"] + RESERVED_BYTES <= SHARED_BYTES and registers <= REGISTERS
        if kernel["spill_bytes"] or not fits:
            wrong.append(kernel["variant"])
    assert wrong == []


def test_the_loss_keeps_the_order_of_reads_and_writes(report: tuple[str, list[dict]]) -> None:
    """Threads share a row: all must have read it before one writes, and have written before the target's correction."""
    (code,) = (kernel["ptx"] for kernel in report[1] if kernel["variant"].endswith("with gradient"))
    operations = re.findall(r"\b(ld\.global|bar\.sync|st\.global\.v4|st\.global\.b16)\b", code)
    order = "".join(
        {"ld.global": "r", "bar.sync": "|", "st.global.v4": "w", "st.global.b16": "t"}[x] for x in operations
    )
    # The first row; then the loop: the next row, this row's gradient, the target's. The sum, its start, stands last.
    assert re.fullmatch(r"r+w+\|+t\|+", order), order
