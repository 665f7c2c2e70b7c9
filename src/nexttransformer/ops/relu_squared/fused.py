"""Fused CUDA form of the squared-ReLU MLP: the activation lives in the epilogues of two matrix products.

Kept for the backward pass is a = relu(h)^2 alone: its derivative is 2 relu(h) = 2 sqrt(a), whose relative error
from a's rounding is half of a's. N counts tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nexttransformer.ops.relu_squared.tiles import Tile, chosen_tile


@triton.jit
def _halves(tile, rows: tl.constexpr, columns: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(tile, (rows, 2, columns // 2)), (0, 2, 1)))


@triton.jit
def _finish(part, m, n, c_desc, aux_desc, is_backward: tl.constexpr):
    if is_backward:
        part *= 2.0 * tl.sqrt(aux_desc.load([m, n]).to(tl.float32))
    else:
        part = tl.maximum(part, 0.0)
        part *= part
    c_desc.store([m, n], part.to(tl.bfloat16))


@triton.jit
def _product_kernel(
    a_desc,
    b_desc,
    c_desc,
    aux_desc,
    num_rows,
    num_columns,
    depth: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group: tl.constexpr,
    num_programs: tl.constexpr,
    is_backward: tl.constexpr,
):
    """C = epilogue(A B): relu(.)^2 with B given as (columns, depth); or (.) 2 sqrt(aux) with B as (depth, columns)."""
    tiles_m = tl.cdiv(num_rows, block_m)
    tiles_n = tl.cdiv(num_columns, block_n)
    num_tiles = tiles_m * tiles_n
    per_group = group * tiles_n
    for tile in tl.range(tl.program_id(0), num_tiles, num_programs, flatten=True):
        first_m = (tile // per_group) * group
        rows_here = tl.minimum(tiles_m - first_m, group)
        m = (first_m + (tile % per_group) % rows_here) * block_m
        n = ((tile % per_group) // rows_here) * block_n
        total = tl.zeros((block_m, block_n), dtype=tl.float32)
        for step in range(tl.cdiv(depth, block_k)):
            a = a_desc.load([m, step * block_k])
            if is_backward:
                total = tl.dot(a, b_desc.load([step * block_k, n]), total)
            else:
                total = tl.dot(a, b_desc.load([n, step * block_k]).T, total)
        # In halves: smaller loads and stores leave shared memory to the pipeline.
        left, right = _halves(total, block_m, block_n)
        _finish(left, m, n, c_desc, aux_desc, is_backward)
        _finish(right, m, n + block_n // 2, c_desc, aux_desc, is_backward)


def product(a: Tensor, b: Tensor, num_columns: int, aux: Tensor | None, tile: Tile | None = None) -> Tensor:
    """Runs one of the two products (see the kernel) with a tile, by default the one in use."""
    num_rows, depth = a.shape
    is_backward = aux is not None
    tile = tile or chosen_tile(a.device, is_backward=is_backward)
    num_programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    if tile.is_specialized:
        assert aux is not None
        # Imported on first use: Hopper only.
        from nexttransformer.ops.relu_squared.warp_specialized import specialized_product

        return specialized_product(a, b, aux, tile, num_programs=num_programs)
    c = a.new_empty(num_rows, num_columns)
    part = [tile.rows, tile.columns // 2]
    b_block = [tile.depth, tile.columns] if is_backward else [tile.columns, tile.depth]
    c_desc = TensorDescriptor.from_tensor(c, part)
    _product_kernel[(num_programs,)](  # pyright: ignore[reportIndexIssue]
        TensorDescriptor.from_tensor(a, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(b, b_block),
        c_desc,
        TensorDescriptor.from_tensor(aux, part) if aux is not None else c_desc,
        num_rows,
        num_columns,
        depth=depth,
        block_m=tile.rows,
        block_n=tile.columns,
        block_k=tile.depth,
        group=tile.group,
        num_programs=num_programs,
        is_backward=is_backward,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return c


@torch.library.custom_op("nexttransformer::relu_squared_up", mutates_args=())
def _up(x_ND: Tensor, w1_FD: Tensor) -> Tensor:
    return product(x_ND, w1_FD, w1_FD.shape[0], None)


@_up.register_fake
def _(x_ND: Tensor, w1_FD: Tensor) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], w1_FD.shape[0])


@torch.library.custom_op("nexttransformer::relu_squared_down_backward", mutates_args=())
def _down_backward(dy_ND: Tensor, w2_DF: Tensor, a_NF: Tensor) -> Tensor:
    return product(dy_ND, w2_DF, w2_DF.shape[1], a_NF)


@_down_backward.register_fake
def _(dy_ND: Tensor, w2_DF: Tensor, a_NF: Tensor) -> Tensor:
    return torch.empty_like(a_NF)


@torch.library.custom_op("nexttransformer::relu_squared_mlp", mutates_args=())
def _mlp(x_ND: Tensor, w1_FD: Tensor, w2_DF: Tensor) -> tuple[Tensor, Tensor]:
    a_NF = _up(x_ND, w1_FD)
    return a_NF @ w2_DF.t(), a_NF


@_mlp.register_fake
def _(x_ND: Tensor, w1_FD: Tensor, w2_DF: Tensor):
    return torch.empty_like(x_ND), x_ND.new_empty(x_ND.shape[0], w1_FD.shape[0])


@torch.library.custom_op("nexttransformer::relu_squared_mlp_backward", mutates_args=())
def _mlp_backward(
    dy_ND: Tensor, x_ND: Tensor, w1_FD: Tensor, w2_DF: Tensor, a_NF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dh_NF = _down_backward(dy_ND, w2_DF, a_NF)
    return dh_NF @ w1_FD, dh_NF.t() @ x_ND, dy_ND.t() @ a_NF


@_mlp_backward.register_fake
def _(dy_ND: Tensor, x_ND: Tensor, w1_FD: Tensor, w2_DF: Tensor, a_NF: Tensor):
    return torch.empty_like(x_ND), torch.empty_like(w1_FD), torch.empty_like(w2_DF)


def _setup(ctx, inputs, output) -> None:
    # The kept activation has no gradient; zeros for it would be as large.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


def _autograd(ctx, dy_ND: Tensor, _: Tensor | None):
    return _mlp_backward(dy_ND.contiguous(), *ctx.saved_tensors)


_mlp.register_autograd(_autograd, setup_context=_setup)


def relu_squared_mlp_fused(x_BTD: Tensor, w1_FD: Tensor, w2_DF: Tensor) -> Tensor:
    """See `ops.relu_squared.relu_squared_mlp`; bfloat16, widths that are multiples of 64."""
    y_ND, _ = _mlp(x_BTD.flatten(0, 1), w1_FD, w2_DF)
    return y_ND.view_as(x_BTD)
