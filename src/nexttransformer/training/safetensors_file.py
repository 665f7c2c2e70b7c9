"""Streaming safetensors writer (hashes while writing, one tensor in memory at a time) and a small reader."""

import hashlib
import json
import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from nexttransformer.errors import CheckpointError
from nexttransformer.training.weights_digest import DTYPE_NAMES, combine_tensor_hashes, tensor_bytes

# Tensors on their way to the disk: bounds host memory to this many of the largest.
_MAX_IN_FLIGHT = 4
_HASH_THREADS = 4

ShapeAndType = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class WrittenFile:
    """A durable file: its size, the SHA-256 of its bytes, the layout-free digest of its tensors."""

    path: Path
    num_bytes: int
    sha256: str
    weights_digest: str


def header_bytes(layout: Mapping[str, ShapeAndType], metadata: Mapping[str, str]) -> bytes:
    """Returns the length-prefixed header of a file with these tensors, in the order `tensor_order` gives."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for name in tensor_order(layout):
        shape, dtype = layout[name]
        end = offset + tensor_num_bytes(shape, dtype)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_order(layout: Mapping[str, ShapeAndType]) -> list[str]:
    """Returns names with the widest element type first, then by name: every tensor stays aligned."""
    return sorted(layout, key=lambda name: (-layout[name][1].itemsize, name))


def tensor_num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Returns the bytes of a tensor of that shape and type."""
    return torch.Size(shape).numel() * dtype.itemsize


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> WrittenFile:
    """Writes a file so that it appears complete and durable or not at all.

    Each tensor is copied from its device once; one thread writes and others hash what was copied.

    Args:
        path: final name; a temporary name in the same folder is used until the file is durable.
        tensors: by name, any device and layout.
        metadata: strings for the header.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    order = tensor_order(layout)
    temporary = path.with_name(f".{path.name}.tmp")
    file_hash = hashlib.sha256()
    hashes: dict[str, Future[str]] = {}
    num_bytes = 0
    try:
        with (
            temporary.open("wb", buffering=0) as file,
            ThreadPoolExecutor(1) as writer,
            ThreadPoolExecutor(1) as file_hasher,
            ThreadPoolExecutor(_HASH_THREADS) as tensor_hashers,
        ):
            in_flight: deque[list[Future[Any]]] = deque()

            def send(content: memoryview) -> list[Future[Any]]:
                return [writer.submit(_write_all, file, content), file_hasher.submit(file_hash.update, content)]

            header = header_bytes(layout, metadata)
            num_bytes += len(header)
            in_flight.append(send(memoryview(header)))
            for name in order:
                content = tensor_bytes(tensors[name])
                num_bytes += len(content)
                hashes[name] = tensor_hashers.submit(_sha256, content)
                in_flight.append([*send(content), hashes[name]])
                if len(in_flight) > _MAX_IN_FLIGHT:
                    _wait(in_flight.popleft())
            while in_flight:
                _wait(in_flight.popleft())
            os.fsync(file.fileno())
        got = temporary.stat().st_size
        if got != num_bytes:
            raise OSError(None, f"wrote {num_bytes} bytes, but the file has {got}")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    described = ((name, DTYPE_NAMES[layout[name][1]], layout[name][0], hashes[name].result()) for name in order)
    return WrittenFile(path, num_bytes, file_hash.hexdigest(), combine_tensor_hashes(described))


def _write_all(file: Any, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]


def _sha256(content: memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _wait(futures: list[Future[Any]]) -> None:
    for future in futures:
        future.result()


class SafetensorsReader:
    """Reads tensors of one file by name (mapped, so only what is asked for is read)."""

    def __init__(self, path: Path) -> None:
        """Opens a file whose size and digest were checked before, or that of an export.

        Raises:
            CheckpointError: if its header is damaged.
        """
        try:
            self._file = safetensors.safe_open(str(path), framework="pt", device="cpu")
        except safetensors.SafetensorError as problem:
            raise CheckpointError(f"{path}: damaged: {problem}. Use an undamaged copy.") from None

    def layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns name -> (dtype as safetensors writes it, shape)."""
        result = {}
        for name in self._file.keys():  # noqa: SIM118 - the handle is no mapping
            part = self._file.get_slice(name)
            result[name] = (str(part.get_dtype()), tuple(part.get_shape()))
        return result

    def metadata(self) -> dict[str, str]:
        """Returns the header's strings."""
        return dict(self._file.metadata() or {})

    def get(self, name: str) -> Tensor:
        """Returns one whole CPU tensor."""
        return self._file.get_tensor(name)
