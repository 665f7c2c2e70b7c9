"""Kimi delta attention in plain PyTorch: the token loop (test oracle) and the chunked form (truth and CPU path).

The gated delta rule with one decay per key channel:
    S <- Diag(e^g) S; S <- S + k (beta (v - S^T k))^T; o = S^T q / sqrt(K).
Chunk form as in `ops/gated_delta_rule/naive.py` with E_ij = exp(G_i - G_j) per channel. Products of two blocks of
rows are taken relative to the first row of the later block, so that every exponent used is <= 0.
Source: arXiv 2510.26692; agrees with fla.ops.kda of fla-core 0.6.0.
"""

import torch
from torch import Tensor

from nexttransformer.ops.chunking import merge_chunks, scan_chunks, split_chunks, working_dtype
from nexttransformer.ops.gated_delta_rule.naive import initial_state

# Rows of a block whose products are formed channel by channel.
BLOCK_TOKENS = 16


def kimi_delta_attention_loop(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    *,
    initial_state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Evaluates token by token; arguments and results as `kimi_delta_attention`, the state always returned."""
    dtype = working_dtype(q_BTHK)
    q, k, v, g, beta = (x.to(dtype) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH))
    state_BHKV = initial_state(k, v, initial_state_BHKV)
    outputs = []
    for t in range(q.shape[1]):
        state_BHKV = g[:, t].exp()[..., None] * state_BHKV
        read_BHV = torch.einsum("bhkv,bhk->bhv", state_BHKV, k[:, t])
        write_BHV = beta[:, t, :, None] * (v[:, t] - read_BHV)
        state_BHKV = state_BHKV + k[:, t, :, :, None] * write_BHV[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state_BHKV, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1).to(v_BTHV.dtype), state_BHKV


def kimi_delta_attention_chunk(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    *,
    initial_state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Evaluates chunk by chunk; arguments and results as `kimi_delta_attention`, the state always returned."""
    dtype = working_dtype(q_BTHK)
    q, k, v = (split_chunks(x, dtype) for x in (q_BTHK, k_BTHK, v_BTHV))
    q = q * q.shape[-1] ** -0.5
    beta_BHNC1 = split_chunks(beta_BTH[..., None], dtype)
    total_BHNCK = split_chunks(g_BTHK, dtype).cumsum(3)
    scores_BHNCC, keys_BHNCC = _decayed_products(q, k, total_BHNCK)
    start_BHNCK = total_BHNCK.exp()
    right = torch.cat([beta_BHNC1 * start_BHNCK * k, beta_BHNC1 * v], dim=-1)
    left = (beta_BHNC1 * keys_BHNCC).tril(-1)
    solved = torch.linalg.solve_triangular(left, right, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    end_BHN1K = total_BHNCK[:, :, :, -1:]
    o, state_BHKV = scan_chunks(
        w,
        u,
        start_BHNCK * q,
        scores_BHNCC,
        (end_BHN1K - total_BHNCK).exp() * k,
        end_BHN1K[:, :, :, 0].exp(),
        initial_state(k_BTHK, v_BTHV, initial_state_BHKV).to(dtype),
    )
    return merge_chunks(o, q_BTHK.shape[1]).to(v_BTHV.dtype), state_BHKV


def _decayed_products(q_BHNCK: Tensor, k_BHNCK: Tensor, total_BHNCK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sum_c q_ic k_jc exp(G_ic - G_jc) and the same of keys with keys, [B, H, N, C, C], zero for j > i."""
    num_rows = q_BHNCK.shape[3]
    block = min(BLOCK_TOKENS, num_rows)
    above = torch.ones(block, block, dtype=torch.bool, device=q_BHNCK.device).triu(1)
    both = torch.stack([q_BHNCK, k_BHNCK])
    bands = []
    for first in range(0, num_rows, block):
        rows = slice(first, first + block)
        total, earlier = total_BHNCK[..., rows, :], total_BHNCK[..., :first, :]
        exponent = total[..., :, None, :] - total[..., None, :, :]
        weighted = exponent.masked_fill(above[..., None], -torch.inf).exp() * k_BHNCK[..., None, rows, :]
        diagonal = (weighted @ both[..., rows, :, None])[..., 0]
        reference = total[..., :1, :]
        left = both[..., rows, :] * (total - reference).exp()
        right = k_BHNCK[..., :first, :] * (reference - earlier).exp()
        zeros = diagonal.new_zeros(*diagonal.shape[:-1], num_rows - first - block)
        bands.append(torch.cat([left @ right.transpose(-1, -2), diagonal, zeros], dim=-1))
    products = torch.cat(bands, dim=-2)
    return products[0], products[1]
