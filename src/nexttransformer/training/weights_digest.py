"""Identity of weights: the SHA-256 digest of any file layout, and the fast device checksum over ranks."""

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from nexttransformer.training.collectives import Collectives

# As safetensors writes them.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements widened to int64 at a time: 64 MiB twice, whatever the tensor.
_CHUNK_ELEMENTS = 2**23


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Returns a CPU view of a tensor's raw little-endian bytes; copies only from another device or layout."""
    assert sys.byteorder == "little"
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def combine_tensor_hashes(hashes: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """Returns the digest from (name, safetensors dtype, shape, SHA-256 of the bytes) in any order."""
    result = hashlib.sha256()
    for name, dtype, shape, sha256 in sorted(hashes):
        result.update(f"{name}\t{dtype}\t{','.join(map(str, shape))}\t{sha256}\n".encode())
    return result.hexdigest()


def weights_digest(tensors: Mapping[str, Tensor], *, num_threads: int | None = None) -> str:
    """Returns the digest of named tensors, hashed in parallel; independent of device and file layout.

    SHA-256 over one line per tensor in name order: name, TAB, dtype as safetensors writes it, TAB,
    shape as `a,b`, TAB, SHA-256 of its raw little-endian bytes, LF.
    """

    def describe(name: str) -> tuple[str, str, tuple[int, ...], str]:
        tensor = tensors[name]
        sha256 = hashlib.sha256(tensor_bytes(tensor)).hexdigest()
        return name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), sha256

    with ThreadPoolExecutor(num_threads or min(8, os.cpu_count() or 1)) as pool:
        return combine_tensor_hashes(pool.map(describe, tensors))


def device_checksum(tensor: Tensor) -> Tensor:
    """Returns a 64-bit checksum, an int64 scalar on the tensor's device.

    Bit patterns times odd position weights (1, 3, 5, ...), summed modulo 2^64. An odd factor has an
    inverse, so any single changed element changes the sum.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(torch.uint8 if flat.dtype == torch.bool else _INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    length = min(bits.numel(), _CHUNK_ELEMENTS)
    weights = torch.arange(1, 2 * length + 1, 2, dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK_ELEMENTS):
        chunk = bits[start : start + _CHUNK_ELEMENTS].to(torch.int64)
        # The weights of this chunk are 2 x start more than those of the first.
        total += (chunk * weights[: chunk.numel()]).sum() + 2 * start * chunk.sum()
    return total


def device_checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns all checksums as integers, read from the device once."""
    if not tensors:
        return {}
    values = torch.stack([device_checksum(tensor) for tensor in tensors.values()]).tolist()
    return dict(zip(tensors, values, strict=True))


def find_difference(tensors: Mapping[str, Tensor], collectives: Collectives, host: str) -> str | None:
    """Compares all ranks' copies with rank 0's; collective.

    Returns:
        The same on every rank: None if all are equal, else one line naming rank, host and tensors.
    """
    gathered = collectives.gather_objects((host, device_checksums(tensors)))
    problem = None
    if gathered is not None:
        expected = gathered[0][1]
        for rank, (rank_host, checksums) in enumerate(gathered):
            names = [name for name in {**expected, **checksums} if expected.get(name) != checksums.get(name)]
            if names:
                more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
                problem = f"rank {rank} on {rank_host} differs from rank 0 in {', '.join(names[:3])}{more}"
                break
    return collectives.broadcast_object(problem)
