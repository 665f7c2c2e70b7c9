"""The echo model: no weights, known decisions on every CORE row. One token per byte, BOS 256, V = 257.

After tokens x_0..x_p the logit of v is ((7 x_p + 13 v) mod 251) / 64, plus 6 for v = x_{s+1}, where s is the
largest index with 2 <= s < p at which the last three tokens were the same as at p; no such s, no bonus.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

VOCAB = 257
BOS = 256
BONUS = 6.0
NOTHING = -1


class EchoTokenizer:
    """One token per UTF-8 byte."""

    bos_id = BOS
    vocab_size = VOCAB

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))


class EchoState(NamedTuple):
    """All ids so far, [B, S]."""

    ids_BS: Tensor


class EchoModel:
    """The model interface of evaluation: hidden vectors are (last id, id with the bonus or -1)."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        last, v = np.arange(VOCAB)[:, None], np.arange(VOCAB)[None, :]
        self.base_VV = torch.from_numpy(((7 * last + 13 * v) % 251) / 64).to(dtype)

    def hidden(
        self, ids_BT: Tensor, *, state: EchoState | None = None, want_state: bool = False
    ) -> tuple[Tensor, EchoState | None]:
        ids_BS = ids_BT if state is None else torch.cat([state.ids_BS, ids_BT], dim=1)
        bonus_BS = np.stack([_echoes(row) for row in ids_BS.numpy()])
        h_BS2 = torch.stack([ids_BS, torch.from_numpy(bonus_BS)], dim=-1)
        return h_BS2[:, ids_BS.shape[1] - ids_BT.shape[1] :], EchoState(ids_BS) if want_state else None

    def head_logits(self, h: Tensor) -> Tensor:
        logits = self.base_VV[h[..., 0]]
        has_bonus = h[..., 1] != NOTHING
        logits[has_bonus, h[..., 1][has_bonus]] += BONUS
        return logits


def _echoes(ids: np.ndarray) -> np.ndarray:
    """Returns, per position p, the token that followed the last earlier occurrence of the three tokens at p."""
    found = np.full(len(ids), NOTHING, dtype=np.int64)
    if len(ids) < 4:
        return found
    codes = (ids[:-2] * VOCAB + ids[1:-1]) * VOCAB + ids[2:]
    order = np.argsort(codes, kind="stable")
    is_repeat = codes[order[1:]] == codes[order[:-1]]
    # Code i ends at position i + 2; what followed the earlier one stands at its position + 1.
    found[order[1:][is_repeat] + 2] = ids[order[:-1][is_repeat] + 3]
    return found
