"""A value that the compiler computes once and stores, instead of computing it wherever it is used."""

import torch
from torch import Tensor


@torch.library.custom_op("nexttransformer::materialize", mutates_args=())
def _materialize(x: Tensor) -> Tensor:
    return x.clone()


@_materialize.register_fake
def _(x):
    return torch.empty_like(x)


_materialize.register_autograd(lambda ctx, gradient: gradient)


def materialize(x: Tensor) -> Tensor:
    """Returns x; in compiled code a copy of it in memory.

    For weights per token that multiply every channel: generated code would otherwise repeat what they are made of,
    such as a softmax, for each channel.
    """
    return _materialize(x) if torch.compiler.is_compiling() else x
