import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nexttransformer.training.collectives import SingleProcess
from nexttransformer.training.safetensors_file import SafetensorsReader, write_safetensors
from nexttransformer.training.weights_digest import device_checksum, device_checksums, find_difference, weights_digest


def test_the_digest_by_hand() -> None:
    tensors = {
        "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "a.weight": torch.tensor([1, 2, 3], dtype=torch.int64),
        "c": torch.tensor(1.0, dtype=torch.bfloat16),
    }
    lines = [
        ("a.weight", "I64", "3", np.array([1, 2, 3], dtype="<i8").tobytes()),
        ("b", "F32", "2,2", np.array([1, 2, 3, 4], dtype="<f4").tobytes()),
        # 1.0 in bfloat16 is 0x3f80.
        ("c", "BF16", "", b"\x80\x3f"),
    ]
    text = "".join(
        f"{name}\t{dtype}\t{shape}\t{hashlib.sha256(data).hexdigest()}\n" for name, dtype, shape, data in lines
    )
    assert weights_digest(tensors) == hashlib.sha256(text.encode()).hexdigest()
    assert weights_digest(dict(reversed(tensors.items())), num_threads=1) == weights_digest(tensors)


def test_the_digest_ignores_layout_in_memory_and_in_files(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    assert weights_digest({"w": base.T}) == weights_digest({"w": base.T.contiguous()})
    tensors = {"w": base.T, "scale": torch.ones(3, dtype=torch.float16), "empty": torch.zeros(0, 4)}
    written = write_safetensors(tmp_path / "a.safetensors", tensors, {"note": "é"})
    assert written.weights_digest == weights_digest(tensors)
    data = (tmp_path / "a.safetensors").read_bytes()
    assert (written.num_bytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    reader = SafetensorsReader(tmp_path / "a.safetensors")
    assert reader.metadata() == {"note": "é"}
    assert reader.layout() == {"w": ("F32", (4, 3)), "scale": ("F16", (3,)), "empty": ("F32", (0, 4))}
    assert weights_digest({name: reader.get(name) for name in tensors}) == written.weights_digest
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def checksum_in_python(tensor: torch.Tensor) -> int:
    """The definition, in unlimited integers: bit patterns (signed) times 1, 3, 5, ... modulo 2^64."""
    kinds = {4: np.int32, 2: np.int16, 8: np.int64, 1: np.int8}
    bits = np.frombuffer(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), dtype=kinds[tensor.element_size()])
    total = sum(int(value) * (2 * index + 1) for index, value in enumerate(bits)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8])
def test_the_device_checksum_agrees_with_its_definition(dtype: torch.dtype) -> None:
    tensor = (torch.randn(37, 5, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    assert int(device_checksum(tensor)) == checksum_in_python(tensor)


def test_the_device_checksum_does_not_depend_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = int(device_checksum(tensor))
    monkeypatch.setattr("nexttransformer.training.weights_digest._CHUNK_ELEMENTS", 7)
    assert int(device_checksum(tensor)) == whole


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 299), st.integers(0, 31))
def test_any_changed_bit_changes_the_checksum(element: int, bit: int) -> None:
    tensor = torch.linspace(-1, 1, 300)
    changed = tensor.clone()
    changed.view(torch.int32)[element] ^= torch.tensor(-(2**31) if bit == 31 else 2**bit, dtype=torch.int32)
    assert int(device_checksum(changed)) != int(device_checksum(tensor))


def test_exchanged_elements_and_tensors_are_seen() -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0])
    assert int(device_checksum(tensor)) != int(device_checksum(tensor.flip(0)))
    assert device_checksums({"a": tensor, "b": tensor.flip(0)}) != device_checksums({"a": tensor.flip(0), "b": tensor})
    assert device_checksums({}) == {}
    assert find_difference({"a": tensor}, SingleProcess(), "host") is None
