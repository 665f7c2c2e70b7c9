"""Kimi delta attention on CUDA: the kernels of fla-core as custom operations, so that a compiled model stays one graph.

Calls `chunk_kda_fwd` and `chunk_kda_bwd` of fla-core 0.6.0 (what its autograd function calls), recomputing the chunk
states in the backward. Unit length, decay and sigmoid are applied outside. Shape letters: C tokens of a chunk.
"""

import torch
from torch import Tensor

from nexttransformer.ops import backends, fla_core
from nexttransformer.ops.chunking import CHUNK_TOKENS
from nexttransformer.ops.kimi_delta_attention.naive import kimi_delta_attention_chunk

_FORWARD_MODULE, _BACKWARD_MODULE = "fla.ops.kda.chunk_fwd", "fla.ops.kda.chunk_bwd"


def kimi_delta_attention_fused(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    *,
    initial_state_BHKV: Tensor | None = None,
    want_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See `ops.kimi_delta_attention.kimi_delta_attention`; q, k, v in bfloat16 or float16 on CUDA, K <= 256."""
    path = backends.chosen_path("kimi_delta_attention") or backends.ensure_path("kimi_delta_attention")
    if path == "fla":
        return run_fla(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, initial_state_BHKV, want_state)
    o_BTHV, state_BHKV = kimi_delta_attention_chunk(
        q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, initial_state_BHKV=initial_state_BHKV
    )
    return o_BTHV, state_BHKV if want_state else None


def run_fla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, want_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Runs the native kernel whatever path is chosen (the self-check measures it)."""
    o, state, _, _, _ = _forward(q, k, v, g, beta, initial_state, want_state)
    return o, state if want_state else None


@torch.library.custom_op("nexttransformer::kimi_delta_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, want_state: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns output, final state (empty unless wanted), cumulative decay [B, T, H, K], two matrices [B, T, H, C]."""
    fla = fla_core.load(_FORWARD_MODULE)
    with torch.cuda.device_of(q):
        o, state, total, scores, inverse, *_ = fla.chunk_kda_fwd(
            q=q.contiguous(),
            k=k.contiguous(),
            v=v.contiguous(),
            g=g.contiguous(),
            beta=beta.contiguous(),
            scale=q.shape[-1] ** -0.5,
            initial_state=None if initial_state is None else initial_state.contiguous(),
            output_final_state=want_state,
            chunk_size=CHUNK_TOKENS,
        )
    return o.to(v.dtype), state if want_state else q.new_empty(0, dtype=torch.float32), total, scores, inverse


@_forward.register_fake
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, want_state: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, num_tokens, heads, key_dim = q.shape
    state_shape = (rows, heads, key_dim, v.shape[-1]) if want_state else (0,)
    return (
        v.new_empty(v.shape),
        q.new_empty(state_shape, dtype=torch.float32),
        g.new_empty(g.shape, dtype=torch.float32),
        k.new_empty(rows, num_tokens, heads, CHUNK_TOKENS),
        k.new_empty(rows, num_tokens, heads, CHUNK_TOKENS),
    )


@torch.library.custom_op("nexttransformer::kimi_delta_attention_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    total: Tensor,
    beta: Tensor,
    scores: Tensor,
    inverse: Tensor,
    initial_state: Tensor | None,
    do: Tensor,
    dstate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v, g, beta and the initial state (empty without one)."""
    fla = fla_core.load(_BACKWARD_MODULE)
    with torch.cuda.device_of(q):
        dq, dk, dv, dbeta, dg, dinitial, _, _ = fla.chunk_kda_bwd(
            q=q.contiguous(),
            k=k.contiguous(),
            v=v.contiguous(),
            beta=beta.contiguous(),
            Aqk=scores,
            Akk=inverse,
            scale=q.shape[-1] ** -0.5,
            initial_state=None if initial_state is None else initial_state.contiguous(),
            do=do.contiguous(),
            dht=None if dstate is None else dstate.contiguous(),
            g=total,
            chunk_size=CHUNK_TOKENS,
        )
    dinitial = q.new_empty(0, dtype=torch.float32) if initial_state is None else dinitial
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg.to(total.dtype), dbeta.to(beta.dtype), dinitial


@_backward.register_fake
def _backward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    total: Tensor,
    beta: Tensor,
    scores: Tensor,
    inverse: Tensor,
    initial_state: Tensor | None,
    do: Tensor,
    dstate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    initial_shape = (0,) if initial_state is None else initial_state.shape
    dq, dk, dv, dg, dbeta = (x.new_empty(x.shape) for x in (q, k, v, total, beta))
    return dq, dk, dv, dg, dbeta, q.new_empty(initial_shape, dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    q, k, v, _, beta, initial_state, ctx.want_state = inputs
    _, _, total, scores, inverse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, total, beta, scores, inverse, initial_state)


def _differentiate(ctx, do: Tensor | None, dstate: Tensor | None, dtotal: None, dscores: None, dinverse: None):
    q, k, v, total, beta, scores, inverse, initial_state = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    dstate = dstate if ctx.want_state else None
    dq, dk, dv, dg, dbeta, dinitial = _backward(q, k, v, total, beta, scores, inverse, initial_state, do, dstate)
    return dq, dk, dv, dg, dbeta, None if initial_state is None else dinitial, None


_forward.register_autograd(_differentiate, setup_context=_save)
