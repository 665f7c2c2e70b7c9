"""The tokens of a pass sorted by id, once for all tables that are looked up with the same ids."""

from typing import NamedTuple

import torch
from torch import Tensor


class LookupOrder(NamedTuple):
    """N tokens by id.

    Attributes:
        tokens_N: positions in the flattened ids, those of one id together and ascending, int32.
        ids_N: the ids in that order, int32.
        starts: where the tokens of each id begin, [num_rows + 1], int32; the last entry is N.
    """

    tokens_N: Tensor
    ids_N: Tensor
    starts: Tensor


@torch.library.custom_op("nexttransformer::lookup_order", mutates_args=())
def _order(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    # A radix sort passes over the tokens once for every eight bits.
    keys_N = ids.flatten().to(torch.int16 if num_rows <= 2**15 else torch.int32)
    keys_N, tokens_N = keys_N.sort(stable=True)
    ids_N = keys_N.to(torch.int32)
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=ids.device)
    return tokens_N.to(torch.int32), ids_N, torch.searchsorted(ids_N, rows, out_int32=True)


@_order.register_fake
def _(ids, num_rows):
    tokens_N = ids.new_empty(ids.numel(), dtype=torch.int32)
    return tokens_N, torch.empty_like(tokens_N), ids.new_empty(num_rows + 1, dtype=torch.int32)


def order_tokens(ids: Tensor, num_rows: int) -> LookupOrder:
    """Returns the order of ids (int64 or int32, any shape, from 0 to num_rows - 1)."""
    return LookupOrder(*_order(ids, num_rows))
