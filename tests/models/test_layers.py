"""Layers that parts are built from, against PyTorch's own."""

import torch
import torch.nn.functional as functional

from nexttransformer.models.layers import CausalConv


def test_causal_convolution_whole_and_in_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    conv = CausalConv(6, taps=4)
    conv.load_state_dict({"weight": torch.randn(6, 4, generator=generator)})
    x_BTC = torch.randn(2, 11, 6, generator=generator)
    padded_BCT = functional.pad(x_BTC.mT, (3, 0))
    expected_BTC = functional.conv1d(padded_BCT, conv.weight[:, None], groups=6).mT
    torch.testing.assert_close(conv(x_BTC), expected_BTC)
    assert conv(x_BTC.bfloat16()).dtype == torch.bfloat16

    parts, cache = [], None
    # Parts shorter and longer than the cached inputs.
    for part in x_BTC.split([1, 2, 7, 1], dim=1):
        parts.append(conv(part, cache))
        cache = conv.next_cache(part, cache)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected_BTC)
    assert cache is not None and torch.equal(cache, x_BTC[:, -3:])
