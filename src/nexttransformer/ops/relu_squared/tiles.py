"""Tiles of the squared-ReLU products: the candidates, the fixed choice, and how to time them on a GPU.

The choice is a constant for each kind of GPU, so that two runs use the same kernel. `bench --parts tiles`
times all candidates at a model's shape; a better one becomes the first of its list.
"""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """How a product is cut: a program makes `rows` x `columns` of the result in steps of `depth`.

    `group` row tiles share the columns they read; `num_stages` loads are under way at a time. `is_specialized`: some
    warps load and others multiply, on Hopper GPUs only (`warp_specialized`); their number, two times four and one, is
    fixed there, and counts as 12 because a multiprocessor starts them in fours.
    """

    rows: int
    columns: int
    depth: int
    group: int
    num_warps: int
    num_stages: int
    is_specialized: bool = False


# The first of each list that runs on the GPU is in use. Smaller tiles, and two programs a multiprocessor, were slower.
FORWARD_TILES = (
    Tile(128, 256, 64, 8, 8, 3),
    Tile(128, 256, 64, 16, 8, 3),
    Tile(128, 256, 64, 4, 8, 3),
    Tile(128, 256, 64, 8, 8, 4),
    Tile(256, 128, 64, 8, 8, 4),
)
BACKWARD_TILES = (
    Tile(128, 256, 64, 16, 12, 3, is_specialized=True),
    Tile(128, 256, 64, 8, 12, 3, is_specialized=True),
    Tile(128, 256, 64, 4, 8, 3),
    Tile(128, 256, 64, 8, 8, 3),
    Tile(128, 256, 64, 16, 8, 3),
    Tile(256, 128, 64, 8, 8, 3),
)


def tiles(*, is_backward: bool) -> tuple[Tile, ...]:
    """Returns the candidates of a product, best first."""
    return BACKWARD_TILES if is_backward else FORWARD_TILES


def chosen_tile(device: torch.device, *, is_backward: bool) -> Tile:
    """Returns the tile in use on a GPU."""
    is_hopper = torch.cuda.get_device_properties(device).major == 9
    return next(tile for tile in tiles(is_backward=is_backward) if is_hopper or not tile.is_specialized)


def time_tile(tile: Tile, num_tokens: int, width: int, mlp_width: int, *, is_backward: bool) -> float:
    """Returns the seconds that a product takes with a tile on the current GPU; compilation is not counted.

    Args:
        tile: the candidate.
        num_tokens: rows of the product (N).
        width: D.
        mlp_width: F.
        is_backward: the product of the backward pass.
    """
    from triton.testing import do_bench

    from nexttransformer.ops.relu_squared.fused import product

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    a_ND = draw(num_tokens, width)
    weight = draw(width, mlp_width) if is_backward else draw(mlp_width, width)
    activation_NF = draw(num_tokens, mlp_width).square() if is_backward else None
    milliseconds = do_bench(lambda: product(a_ND, weight, mlp_width, activation_NF, tile), return_mode="median")
    assert isinstance(milliseconds, float)
    return milliseconds / 1000
