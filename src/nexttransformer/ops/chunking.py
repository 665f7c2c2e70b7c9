"""Chunked evaluation of delta-rule recurrences: cutting a sequence into chunks and carrying the state across them.

Shape letters: B rows, T tokens, H heads, K key dim, V value dim, N chunks, C tokens of a chunk.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor

from nexttransformer.models.budget_formulas import CHUNK_TOKENS

__all__ = ["CHUNK_TOKENS", "merge_chunks", "scan_chunks", "split_chunks", "working_dtype"]


def working_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype references compute in: float32, or float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def split_chunks(x_BTHX: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [B, H, N, C, X] in `dtype`, zero-padded to whole chunks.

    Zeros are neutral: k = v = beta = 0 writes nothing and a log decay of 0 forgets nothing.
    """
    num_tokens = x_BTHX.shape[1]
    padded = functional.pad(x_BTHX.to(dtype), (0, 0, 0, 0, 0, -num_tokens % CHUNK_TOKENS))
    return padded.unflatten(1, (-1, CHUNK_TOKENS)).permute(0, 3, 1, 2, 4)


def merge_chunks(x_BHNCX: Tensor, num_tokens: int) -> Tensor:
    """Returns [B, T, H, X] without the padding."""
    return x_BHNCX.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :num_tokens]


def scan_chunks(
    w_BHNCK: Tensor,
    u_BHNCV: Tensor,
    q_BHNCK: Tensor,
    scores_BHNCC: Tensor,
    k_BHNCK: Tensor,
    decay_BHNK: Tensor,
    state_BHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Carries the state over the chunks: V' = U - W S; o = q S + scores V'; S <- decay S + k^T V'.

    Args:
        w_BHNCK: W of the chunk form.
        u_BHNCV: U of the chunk form.
        q_BHNCK: scaled queries times their decay since the chunk's start.
        scores_BHNCC: causal decayed products of scaled queries and keys within a chunk.
        k_BHNCK: keys times the decay from their token to the chunk's end.
        decay_BHNK: decay over the whole chunk, in (0, 1]; last dimension K or 1.
        state_BHKV: state before the first chunk.

    Returns:
        Outputs [B, H, N, C, V] and the state after the last chunk.
    """
    outputs = []
    for n in range(w_BHNCK.shape[2]):
        v_BHCV = u_BHNCV[:, :, n] - w_BHNCK[:, :, n] @ state_BHKV
        outputs.append(q_BHNCK[:, :, n] @ state_BHKV + scores_BHNCC[:, :, n] @ v_BHCV)
        state_BHKV = decay_BHNK[:, :, n, :, None] * state_BHKV + k_BHNCK[:, :, n].transpose(-1, -2) @ v_BHCV
    return torch.stack(outputs, dim=2), state_BHKV
