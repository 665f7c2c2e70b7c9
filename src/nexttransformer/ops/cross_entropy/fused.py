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
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _one_minus_tanh(z, soft_cap):
    root = tl.rsqrt(1.0 + tl.exp2(z.to(tl.float32) * (2.0 * _LOG2_E / soft_cap)))
    return 2.0 * (root * root)


@triton.jit
def _load_row(start, target_ptr, is_row, num_columns: tl.constexpr, block: tl.constexpr):
    """Returns a row's logits in their dtype, the target's place and its logit; zeros where there is no row."""
    columns = tl.arange(0, block)
    is_inside = is_row if block == num_columns else is_row & (columns < num_columns)
    place = start + tl.load(target_ptr, mask=is_row, other=0)
    return tl.load(start + columns, mask=is_inside, other=0.0), place, tl.load(place, mask=is_row, other=0.0)


@triton.jit
def _softcap_kernel(
    logits_ptr,
    targets_ptr,
    nats_ptr,
    soft_cap,
    num_rows,
    num_columns: tl.constexpr,
    block: tl.constexpr,
    num_programs: tl.constexpr,
    with_gradient: tl.constexpr,
):
    # With u = 1 - tanh(z / c) = 2 / (1 + exp(2z / c)), exp(-c u) is exp(capped logit - c), from exp(-2c) to 1, so that
    # no maximum is needed; and 1 - tanh^2 = u (2 - u).
    columns = tl.arange(0, block)
    first = tl.program_id(0)
    start = logits_ptr + first.to(tl.int64) * num_columns
    z, place, z_target = _load_row(start, targets_ptr + first, first < num_rows, num_columns, block)
    for row in tl.range(first, num_rows, num_programs, num_stages=1):
        u = _one_minus_tanh(z, soft_cap)
        weight = tl.exp2(u * (-soft_cap * _LOG2_E))
        if block != num_columns:
            weight = tl.where(columns < num_columns, weight, 0.0)
        slope = weight * (u * (2.0 - u))
        total = tl.sum(weight, 0)
        u_target = _one_minus_tanh(z_target, soft_cap)
        slope_target = u_target * (2.0 - u_target)
        tl.store(nats_ptr + row, tl.log(total) + soft_cap * u_target)
        # A row fills a multiprocessor: the next one must be on its way while this one is written.
        next_row = row + num_programs
        next_start = start + num_programs * num_columns
        z, next_place, z_target = _load_row(next_start, targets_ptr + next_row, next_row < num_rows, num_columns, block)
        if with_gradient:
            scale = 1.0 / total
            dz = (slope * scale).to(logits_ptr.dtype.element_ty)
            if block == num_columns:
                tl.store(start + columns, dz)
            else:
                tl.store(start + columns, dz, mask=columns < num_columns)
            # The target's gradient follows once every thread has written.
            tl.debug_barrier()
            weight_target = tl.exp2(u_target * (-soft_cap * _LOG2_E))
            tl.store(place, (slope_target * (weight_target * scale - 1.0)).to(logits_ptr.dtype.element_ty))
        start, place = next_start, next_place


@torch.library.custom_op("nexttransformer::softcap_cross_entropy", mutates_args=())
def _forward(
    h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, soft_cap: float, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits_NV = h_ND @ weight_VD.t()
    nats_N = torch.empty(h_ND.shape[0], dtype=torch.float32, device=h_ND.device)
    num_rows, num_columns = logits_NV.shape
    num_warps = 32 if num_columns > 8192 else 8
    num_multiprocessors = torch.cuda.get_device_properties(h_ND.device).multi_processor_count
    num_programs = min(num_rows, num_multiprocessors * (32 // num_warps))
    _softcap_kernel[(num_programs,)](  # pyright: ignore[reportIndexIssue]
        logits_NV,
        targets_N,
        nats_N,
        soft_cap,
        num_rows,
        num_columns=num_columns,
        block=triton.next_power_of_2(num_columns),
        num_programs=num_programs,
        with_gradient=with_gradient,
        num_warps=num_warps,
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
