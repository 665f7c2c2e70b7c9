"""Identity of weights: the SHA-256 digest of any file layout, and the fast device checksum over ranks."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from nexttransformer.training.collectives import Collectives


def weights_digest(tensors: Mapping[str, Tensor], *, num_threads: int = 8) -> str:
    """Returns the digest of named tensors, hashed in parallel; independent of device and file layout.

    SHA-256 over one line per tensor in name order: name, TAB, dtype as safetensors writes it, TAB,
    shape as `a,b`, TAB, SHA-256 of its raw little-endian bytes, LF.
    """
    raise NotImplementedError


def combine_tensor_hashes(hashes: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """Returns the digest from (name, safetensors dtype, shape, SHA-256 of the bytes) in any order."""
    raise NotImplementedError


def device_checksum(tensor: Tensor) -> int:
    """Returns a 64-bit checksum, computed on the tensor's device: bit patterns times odd position weights mod 2^64.

    Any single changed bit changes it.
    """
    raise NotImplementedError


def find_difference(tensors: Mapping[str, Tensor], collectives: Collectives, host: str) -> str | None:
    """Compares all ranks' copies with rank 0's; collective.

    Returns:
        The same on every rank: None if all are equal, else one line naming rank, host and tensor.
    """
    raise NotImplementedError
