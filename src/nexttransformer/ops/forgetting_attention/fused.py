"""Forgetting attention on CUDA: the kernel of fla-core as custom operations, so that a compiled model stays one graph.

Calls `parallel_attn_fwd` and `parallel_attn_bwd` of fla-core 0.6.0 with a cumulative gate, as its
`parallel_forgetting_attn` does. Its window counts the query's own key.
"""

import torch
from torch import Tensor

from nexttransformer.ops import backends, fla_core
from nexttransformer.ops.forgetting_attention.naive import forgetting_attention_naive

_MODULE = "fla.ops.attn.parallel"


def forgetting_attention_fused(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, log_f_BTH: Tensor, *, window: int | None
) -> Tensor:
    """See `ops.forgetting_attention.forgetting_attention`; as many queries as keys, 16-bit inputs on CUDA, K <= 256."""
    name = "forgetting_attention" if window is None else "forgetting_attention_window"
    path = backends.chosen_path(name) or backends.ensure_path(name)
    if path == "fla":
        return run_fla(q_BTHK, k_BTHK, v_BTHV, log_f_BTH, window)
    return forgetting_attention_naive(q_BTHK, k_BTHK, v_BTHV, log_f_BTH, window=window)


def run_fla(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, window: int | None) -> Tensor:
    """Runs the native kernel whatever path is chosen (the self-check measures it)."""
    return _forward(q, k, v, log_f, None if window is None else window + 1)[0]


@torch.library.custom_op("nexttransformer::forgetting_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, window_keys: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output [B, T, H, V], cumulative gate (base 2) and log-sum-exp (base 2), [B, T, H] float32 each."""
    fla = fla_core.load(_MODULE)
    with torch.cuda.device_of(q):
        total = fla.chunk_global_cumsum(log_f.contiguous(), scale=fla.RCP_LN2)
        o, lse = fla.parallel_attn_fwd(
            q=q.contiguous(),
            k=k.contiguous(),
            v=v.contiguous(),
            g_cumsum=total,
            sink_bias=None,
            scale=q.shape[-1] ** -0.5,
            window_size=window_keys,
        )
    return o, total, lse


@_forward.register_fake
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, window_keys: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    statistics_shape = log_f.shape
    return (
        v.new_empty(v.shape),
        log_f.new_empty(statistics_shape, dtype=torch.float32),
        log_f.new_empty(statistics_shape, dtype=torch.float32),
    )


@torch.library.custom_op("nexttransformer::forgetting_attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, total: Tensor, lse: Tensor, do: Tensor, window_keys: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and log f."""
    fla = fla_core.load(_MODULE)
    with torch.cuda.device_of(q):
        dq, dk, dv, dtotal, _ = fla.parallel_attn_bwd(
            q=q.contiguous(),
            k=k.contiguous(),
            v=v.contiguous(),
            o=o,
            g_cumsum=total,
            lse=lse,
            do=do.contiguous(),
            sink_bias=None,
            scale=q.shape[-1] ** -0.5,
            window_size=window_keys,
        )
        dlog_f = fla.chunk_global_cumsum(dtotal, reverse=True)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dlog_f


@_backward.register_fake
def _backward_fake(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, total: Tensor, lse: Tensor, do: Tensor, window_keys: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dlog_f = (x.new_empty(x.shape) for x in (q, k, v, total))
    return dq, dk, dv, dlog_f


def _save(ctx, inputs, output) -> None:
    q, k, v, _, ctx.window_keys = inputs
    o, total, lse = output
    ctx.save_for_backward(q, k, v, o, total, lse)


def _differentiate(ctx, do: Tensor, dtotal: Tensor, dlse: Tensor):
    q, k, v, o, total, lse = ctx.saved_tensors
    return *_backward(q, k, v, o, total, lse, do, ctx.window_keys), None


_forward.register_autograd(_differentiate, setup_context=_save)
