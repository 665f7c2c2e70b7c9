"""The backward product on Hopper with the work shared out: one warp loads, two groups of four warps multiply.

C = (A B) 2 sqrt(aux), A (rows, depth), B (depth, columns). While the groups multiply a tile, the loading warp fetches
its part of aux, which the plain kernel would wait for, and the next tile's operands; results take aux's place in
shared memory. Sums run in the plain kernel's order, so that results are the same bits.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nexttransformer.ops.relu_squared.tiles import Tile

# Triton 3.7 renamed it.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Registers of a multiplying thread and of a loading one.
_REGISTERS = (240, 24)


@gluon.jit
def _place(tile, tiles_m, tiles_n, group: gl.constexpr):
    """Returns a tile's row and column; `group` row tiles follow one another for each column tile."""
    per_group = group * tiles_n
    first = (tile // per_group) * group
    rows = gl.minimum(tiles_m - first, group)
    return first + (tile % per_group) % rows, (tile % per_group) // rows


@gluon.jit
def _after(stage, phase, stages: gl.constexpr):
    wraps = stage + 1 == stages
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _load(
    descs, buffers, barriers, tiles_m, tiles_n, steps: gl.constexpr, group: gl.constexpr, num_programs: gl.constexpr
):
    a_desc, b_desc, aux_desc, _ = descs
    a_buffers, b_buffers, aux_buffers = buffers
    full, empty, aux_full, aux_empty = barriers
    stages: gl.constexpr = a_buffers.shape[0]
    block_m: gl.constexpr = a_buffers.shape[1]
    block_k: gl.constexpr = a_buffers.shape[2]
    block_n: gl.constexpr = b_buffers.shape[2]
    # By then the groups have left the results of the tile before behind them.
    aux_step: gl.constexpr = min(7, steps - 1)
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    aux_phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, num_programs):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, group)
        m, n = tile_m * block_m, tile_n * block_n
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), 2 * (block_m + block_n) * block_k)
            tma.async_copy_global_to_shared(a_desc, [m, step * block_k], full.index(stage), a_buffers.index(stage))
            tma.async_copy_global_to_shared(b_desc, [step * block_k, n], full.index(stage), b_buffers.index(stage))
            stage, phase = _after(stage, phase, stages)
            if step == aux_step:
                for part in gl.static_range(2):
                    mbarrier.wait(aux_empty.index(part), aux_phase)
                    mbarrier.expect(aux_full.index(part), block_m * block_n)
                    tma.async_copy_global_to_shared(
                        aux_desc, [m + part * (block_m // 2), n], aux_full.index(part), aux_buffers.index(part)
                    )
        aux_phase ^= 1


@gluon.jit
def _multiply(
    part: gl.constexpr,
    descs,
    buffers,
    barriers,
    tiles_m,
    tiles_n,
    steps: gl.constexpr,
    group: gl.constexpr,
    num_programs: gl.constexpr,
):
    _, _, _, c_desc = descs
    a_buffers, b_buffers, aux_buffers = buffers
    full, empty, aux_full, aux_empty = barriers
    stages: gl.constexpr = a_buffers.shape[0]
    half: gl.constexpr = a_buffers.shape[1] // 2
    block_n: gl.constexpr = b_buffers.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16])
    release_step: gl.constexpr = min(2, steps - 1)
    aux = aux_buffers.index(part)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    aux_phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, num_programs):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, group)
        total = warpgroup_mma_init(gl.zeros([half, block_n], gl.float32, layout))
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a = a_buffers.index(stage).slice(part * half, half, 0)
            total = warpgroup_mma(a, b_buffers.index(stage), total, is_async=True)
            # One product stays under way; the one before has read its stage.
            total = warpgroup_mma_init(warpgroup_mma_wait(1, [total]))
            mbarrier.arrive(empty.index(gl.where(stage == 0, stages - 1, stage - 1)), pred=step > 0)
            if step == release_step:
                tma.store_wait(0)
                mbarrier.arrive(aux_empty.index(part), pred=tile >= num_programs)
            stage, phase = _after(stage, phase, stages)
        total = warpgroup_mma_wait(0, [total])
        mbarrier.arrive(empty.index(gl.where(stage == 0, stages - 1, stage - 1)))
        mbarrier.wait(aux_full.index(part), aux_phase)
        aux_phase ^= 1
        total *= 2.0 * gl.sqrt(aux.load(layout).to(gl.float32))
        _barrier()
        aux.store(total.to(gl.bfloat16))
        fence_async_shared()
        _barrier()
        tma.async_copy_shared_to_global(c_desc, [(2 * tile_m + part) * half, tile_n * block_n], aux)
    tma.store_wait(0)


@gluon.jit
def _specialized_product_kernel(
    a_desc,
    b_desc,
    aux_desc,
    c_desc,
    tiles_m,
    tiles_n,
    steps: gl.constexpr,
    group: gl.constexpr,
    stages: gl.constexpr,
    num_programs: gl.constexpr,
    registers: gl.constexpr,
):
    a_buffers = gl.allocate_shared_memory(gl.bfloat16, [stages] + a_desc.block_type.shape, a_desc.layout)
    b_buffers = gl.allocate_shared_memory(gl.bfloat16, [stages] + b_desc.block_type.shape, b_desc.layout)
    aux_buffers = gl.allocate_shared_memory(gl.bfloat16, [2] + c_desc.block_type.shape, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    aux_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    aux_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(aux_full.index(i), count=1)
        mbarrier.init(aux_empty.index(i), count=1)
    fence_async_shared()
    _barrier()
    descs = (a_desc, b_desc, aux_desc, c_desc)
    buffers = (a_buffers, b_buffers, aux_buffers)
    barriers = (full, empty, aux_full, aux_empty)
    gl.warp_specialize(
        [
            (_multiply, (0, descs, buffers, barriers, tiles_m, tiles_n, steps, group, num_programs)),
            (_multiply, (1, descs, buffers, barriers, tiles_m, tiles_n, steps, group, num_programs)),
            (_load, (descs, buffers, barriers, tiles_m, tiles_n, steps, group, num_programs)),
        ],
        [4, 1],
        [registers[0], registers[1]],
    )


def specialized_product(a: Tensor, b: Tensor, aux: Tensor, tile: Tile, *, num_programs: int) -> Tensor:
    """Returns (a b) 2 sqrt(aux), bfloat16 [rows, columns], on a Hopper GPU.

    Args:
        a: [rows, depth], bfloat16, depth a multiple of 8.
        b: [depth, columns], bfloat16, columns a multiple of 8.
        aux: [rows, columns], bfloat16, not negative.
        tile: a specialized one, with at least two stages.
        num_programs: usually the number of multiprocessors.
    """
    c = a.new_empty(a.shape[0], b.shape[1])

    def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
        return TensorDescriptor.from_tensor(x, [rows, columns], layout)

    _specialized_product_kernel[(num_programs,)](  # pyright: ignore[reportIndexIssue]
        describe(a, tile.rows, tile.depth),
        describe(b, tile.depth, tile.columns),
        describe(aux, tile.rows // 2, tile.columns),
        describe(c, tile.rows // 2, tile.columns),
        triton.cdiv(a.shape[0], tile.rows),
        triton.cdiv(b.shape[1], tile.columns),
        steps=triton.cdiv(a.shape[1], tile.depth),
        group=tile.group,
        stages=tile.num_stages,
        num_programs=num_programs,
        registers=_REGISTERS,
        num_warps=4,
    )
    return c
