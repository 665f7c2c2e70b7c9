"""Fused soft-capped cross-entropy on CUDA: one read and one write of the logits.

The forward pass computes the nats and overwrites the logits by dnats/dz, rounded to the compute dtype as the
separate form rounds it before the head's products; the backward pass scales by the upstream gradient per token:
dh = g (dz W), dW = dz^T (g h). Nothing of size N x V exists in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < num_columns
    start = logits_ptr + row * num_columns
    z = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    # tanh(x) = 1 - 2 / (1 + exp(2x)); exact enough in float32 and free of overflow trouble.
    t = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * z / soft_cap))
    capped = tl.where(inside, soft_cap * t, float("-inf"))
    largest = tl.max(capped, 0)
    total = tl.sum(tl.exp(capped - largest), 0)
    target = tl.load(targets_ptr + row)
    z_target = tl.load(start + target).to(tl.float32)
    capped_target = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * z_target / soft_cap)))
    tl.store(nats_ptr + row, largest + tl.log(total) - capped_target)
    if with_gradient:
        p = tl.exp(capped - largest) / total
        p = tl.where(columns == target, p - 1.0, p)
        dz = p * (1.0 - t * t)
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


def _autograd(ctx, gradient_N: Tensor, _: Tensor):
    dz_NV, h_ND, weight_VD = ctx.saved_tensors
    dh_ND, dweight_VD = _backward(gradient_N, dz_NV, h_ND, weight_VD)
    return dh_ND, dweight_VD, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup)


def softcap_cross_entropy_fused(h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, soft_cap: float) -> Tensor:
    """See `ops.cross_entropy.softcap_cross_entropy`; 16-bit inputs."""
    nats_N, _ = _forward(h_ND, weight_VD.to(h_ND.dtype), targets_N, soft_cap, torch.is_grad_enabled())
    return nats_N
