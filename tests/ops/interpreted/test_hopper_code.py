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
    num_tiles = len(tiles(is_backward=False)) + len(tiles(is_backward=True))
    assert numbers == {
        # Heads of two sizes, with and without value row; backward the convolved values have a launch of their own.
        "rotary_forward_kernel": 4,
        "rotary_backward_kernel": 4,
        "convolved_forward_kernel": 4,
        "convolved_backward_kernel": 8,
        # Four kinds of writes.
        "stream_forward_kernel": 4,
        "stream_backward_kernel": 4,
        "sinkhorn_forward_kernel": 1,
        "sinkhorn_backward_kernel": 1,
        "lookup_gradient_kernel": 1,
        "product_kernel": num_tiles,
        "softcap_kernel": 2,
    }
    wrong = []
    for kernel in kernels:
        several = re.search(r"programs (\d)", kernel["variant"])
        programs = int(several.group(1)) if several else 1
        registers = kernel["num_registers"] * 32 * kernel["num_warps"]
        fits = (
            programs * (kernel["shared_bytes"] + RESERVED_BYTES) <= SHARED_BYTES and programs * registers <= REGISTERS
        )
        if kernel["spill_bytes"] or not fits:
            wrong.append(kernel["variant"])
    assert wrong == []


def test_every_logit_is_read_before_the_first_is_overwritten(report: tuple[str, list[dict]]) -> None:
    """A thread that reads its target's logit late would find the gradient that a faster one left there."""
    (code,) = (kernel["ptx"] for kernel in report[1] if kernel["variant"].endswith("with gradient"))
    operations = re.findall(r"\b(ld\.global|bar\.sync|st\.global\.v4)\b", code)
    reads = [i for i, operation in enumerate(operations) if operation == "ld.global"]
    barriers = [i for i, operation in enumerate(operations) if operation == "bar.sync"]
    writes = [i for i, operation in enumerate(operations) if operation == "st.global.v4"]
    assert reads and writes
    assert any(reads[-1] < barrier < writes[0] for barrier in barriers), operations
