"""Gated delta rule in plain PyTorch: the token loop (test oracle) and the chunked form (truth and CPU path).

Per token and head: S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q / sqrt(K).
Chunk form, G = cumsum(g) within a chunk and E_ij = exp(G_i - G_j) for i >= j:
    A = strict_lower(beta_i E_ij k_i.k_j);  Y = (I + A)^-1 diag(beta);  W = Y (e^G * k);  U = Y v;  V' = U - W S
    o = (e^G * q) S + lower(E_ij q_i.k_j) V';  S <- e^G_C S + (e^(G_C - G) * k)^T V'
Every exponent used is <= 0. Source: arXiv 2412.06464; agrees with fla.ops.gated_delta_rule of fla-core 0.6.0.
"""

import torch
from torch import Tensor

from nexttransformer.ops.chunking import merge_chunks, scan_chunks, split_chunks, working_dtype


def gated_delta_rule_loop(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    initial_state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Evaluates token by token; arguments and results as `gated_delta_rule`, the state always returned."""
    dtype = working_dtype(q_BTHK)
    q, k, v, g, beta = (x.to(dtype) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH))
    state_BHKV = initial_state(k, v, initial_state_BHKV)
    outputs = []
    for t in range(q.shape[1]):
        state_BHKV = g[:, t].exp()[..., None, None] * state_BHKV
        read_BHV = torch.einsum("bhkv,bhk->bhv", state_BHKV, k[:, t])
        write_BHV = beta[:, t, :, None] * (v[:, t] - read_BHV)
        state_BHKV = state_BHKV + k[:, t, :, :, None] * write_BHV[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state_BHKV, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1).to(v_BTHV.dtype), state_BHKV


def gated_delta_rule_chunk(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    initial_state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Evaluates chunk by chunk; arguments and results as `gated_delta_rule`, the state always returned."""
    dtype = working_dtype(q_BTHK)
    q, k, v = (split_chunks(x, dtype) for x in (q_BTHK, k_BTHK, v_BTHV))
    q = q * q.shape[-1] ** -0.5
    beta_BHNC1 = split_chunks(beta_BTH[..., None], dtype)
    total_BHNC1 = split_chunks(g_BTH[..., None], dtype).cumsum(3)
    lower_CC = torch.ones(q.shape[3], q.shape[3], dtype=torch.bool, device=q.device).tril()
    exponent_BHNCC = total_BHNC1 - total_BHNC1.transpose(-1, -2)
    # Masked before exp: above the diagonal exponents are positive and could overflow.
    decay_BHNCC = exponent_BHNCC.masked_fill(~lower_CC, -torch.inf).exp()
    keys_BHNCC = (beta_BHNC1 * decay_BHNCC * (k @ k.transpose(-1, -2))).tril(-1)
    start_BHNC1 = total_BHNC1.exp()
    right = torch.cat([beta_BHNC1 * start_BHNC1 * k, beta_BHNC1 * v], dim=-1)
    solved = torch.linalg.solve_triangular(keys_BHNCC, right, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    scores_BHNCC = decay_BHNCC * (q @ k.transpose(-1, -2))
    end_BHN11 = total_BHNC1[:, :, :, -1:]
    o, state_BHKV = scan_chunks(
        w,
        u,
        start_BHNC1 * q,
        scores_BHNCC,
        (end_BHN11 - total_BHNC1).exp() * k,
        end_BHN11[..., 0].exp(),
        initial_state(k_BTHK, v_BTHV, initial_state_BHKV).to(dtype),
    )
    return merge_chunks(o, q_BTHK.shape[1]).to(v_BTHV.dtype), state_BHKV


def initial_state(k_BTHK: Tensor, v_BTHV: Tensor, state_BHKV: Tensor | None) -> Tensor:
    """Returns the given state, or zeros, in the dtype references compute in."""
    dtype = working_dtype(k_BTHK)
    if state_BHKV is not None:
        return state_BHKV.to(dtype)
    rows, _, heads, key_dim = k_BTHK.shape
    return torch.zeros(rows, heads, key_dim, v_BTHV.shape[-1], dtype=dtype, device=k_BTHK.device)
