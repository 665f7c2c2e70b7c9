"""Fused soft-capped cross-entropy on CUDA: one read and one write of the logits.

The forward pass computes the nats and overwrites the logits by dnats/dz, rounded to the compute dtype as the
separate form rounds it before the head's products; the backward pass scales by the upstream gradient per token:
dh = g (dz W), dW = dz^T (g h). Nothing of size N x V exists in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_SOFT_CAP = 40.0


@triton.jit
def _softcap_kernel(
    logits_ptr,
    targets_ptr,
    nats_ptr,
    soft_cap,
    num_columns: tl.constexpr,
    block: tl.constexpr,
    with_gradient: tl.constexpr,
):
    # With u = 1 - tanh(z / c) = 2 / (1 + exp(2z / c)), exp(-c u) is exp(capped logit - c), from exp(-2c) to 1, so that
    # no maximum is needed; and 1 - tanh^2 = u (2 - u).
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < num_columns
    start = logits_ptr + row * num_columns
    target = tl.load(targets_ptr + row)
    z_target = tl.load(start + target).to(tl.float32)
    u_target = 2.0 / (1.0 + tl.exp(z_target * (2.0 / soft_cap)))
    z = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    u = 2.0 / (1.0 + tl.exp(z * (2.0 / soft_cap)))
    weight = tl.where(inside, tl.exp(-soft_cap * u), 0.0)
    total = tl.sum(weight, 0)
    tl.store(nats_ptr + row, tl.log(total) + soft_cap * u_target)
    if with_gradient:
        # The logits are overwritten below: every thread must have read the target's before.
        tl.debug_barrier()
        dz = weight * (u * (2.0 - u)) * (1.0 / total)
        dz -= tl.where(columns == target, u_target * (2.0 - u_target), 0.0)
        tl.store(start + columns, dz.to(logits_ptr.dtype.element_ty), mask=inside)


@torch.library.custom_op("nexttransformer::softcap_cross_entropy", mutates_args=())
def _forward(
    h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, soft_cap: float, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits_NV = h_ND @ weight_VD.t()
    nats_N = torch.empty(h_ND.shape[0], dtype=torch.float32, device=h_ND.device)
    num_columns = weight_VD.shape[0]
    _softcap_kernel[(h_ND.shape[0],)](  # pyright: ignore[reportIndexIssue]
        logits_NV,
        targets_N,
        nats_N,
        soft_cap,
        num_columns=num_columns,
        block=triton.next_power_of_2(num_columns),
        with_gradient=with_gradient,
        num_warps=32 if num_columns > 8192 else 8,
    )
    return nats_N, logits_NV if with_gradient else logits_NV.new_empty(0)


@_forward.register_fake
def _(h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, soft_cap: float, with_gradient: bool):
    nats_N = h_ND.new_empty(h_ND.shape[0], dtype=torch.float32)
    return nats_N, h_ND.new_empty((h_ND.shape[0], weight_VD.shape[0]) if with_gradient else (0,))


@torch.library.custom_op("nexttransformer::softcap_cross_entropy_backward", mutates_args=())
def _backward(gradient_N: Tensor, dz_NV: Tensor, h_ND: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    dh_ND = ((dz_NV @ weight_VD).float() * gradient_N[:, None]).to(h_ND.dtype)
    scaled_ND = (h_ND.float() * gradient_N[:, None]).to(h_ND.dtype)
    return dh_ND, dz_NV.t() @ scaled_ND


@_backward.register_fake
def _(gradient_N: Tensor, dz_NV: Tensor, h_ND: Tensor, weight_VD: Tensor):
    return torch.empty_like(h_ND), torch.empty_like(weight_VD)


def _setup(ctx, inputs, output) -> None:
    h_ND, weight_VD, _, _, _ = inputs
    ctx.save_for_backward(output[1], h_ND, weight_VD)
    # Or dz, which nobody differentiates, would get zeros of its own size as its gradient.
    ctx.set_materialize_grads(False)


def _autograd(ctx, gradient_N: Tensor | None, _: Tensor | None):
    if gradient_N is None:
        return None, None, None, None, None
    dz_NV, h_ND, weight_VD = ctx.saved_tensors
    dh_ND, dweight_VD = _backward(gradient_N, dz_NV, h_ND, weight_VD)
    return dh_ND, dweight_VD, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup)


def softcap_cross_entropy_fused(h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, soft_cap: float) -> Tensor:
    """See `ops.cross_entropy.softcap_cross_entropy`; 16-bit inputs, soft cap at most 40."""
    assert 0 < soft_cap <= _LARGEST_SOFT_CAP, f"soft cap {soft_cap}: exp(-2c) would leave float32's normal range"
    nats_N, _ = _forward(h_ND, weight_VD.to(h_ND.dtype), targets_N, soft_cap, torch.is_grad_enabled())
    return nats_N
