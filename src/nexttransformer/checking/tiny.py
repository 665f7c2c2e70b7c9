"""Tiny copies of a composition: every part with its options, few layers, sizes of test-v1, random weights."""

from typing import Any

import torch
from torch import Tensor

from nexttransformer.config import ModelConfig
from nexttransformer.models import Decoder, build_model
from nexttransformer.models.parts import tensor_generator
from nexttransformer.protocol import TEST_V1

MLP_WIDTH = 128
# First layers that a copy keeps beside the last one and the first of each kind.
NUM_FIRST_LAYERS = 3


def tiny_copy(config: ModelConfig, *, has_windows: bool = True) -> ModelConfig:
    """Returns a tiny configuration with the same parts and options.

    It keeps the first three layers, the first layer of each kind (type and options) and the last one.
    The options `window` and `*_tokens` are lengths and shrink with the context.

    Args:
        config: the configuration to copy.
        has_windows: False opens every `window` to the whole context.
    """
    kept = {*range(min(NUM_FIRST_LAYERS, config.num_layers)), config.num_layers - 1}
    kept |= {config.layers.index(layer) for layer in config.layers}
    layers = [_shrink(config.layers[index], config.context_tokens) for index in sorted(kept)]
    if not has_windows:
        layers = [{**layer, "window": TEST_V1.context_tokens} if layer.get("window") else layer for layer in layers]
    return config.model_copy(
        update={
            "protocol": TEST_V1.id,
            "width": TEST_V1.width,
            "num_heads": TEST_V1.num_heads,
            "head_dim": TEST_V1.head_dim,
            "context_tokens": TEST_V1.context_tokens,
            "vocab_size": TEST_V1.vocab_size,
            "num_layers": len(layers),
            "mlp_width": MLP_WIDTH,
            "layers": layers,
            "residual": _shrink(config.residual, config.context_tokens),
        }
    )


def _shrink(options: dict[str, Any], context_tokens: int) -> dict[str, Any]:
    return {
        name: max(1, value * TEST_V1.context_tokens // context_tokens)
        if (name == "window" or name.endswith("_tokens")) and isinstance(value, int)
        else value
        for name, value in options.items()
    }


@torch.no_grad()
def build_randomized(
    config: ModelConfig, *, bound: float | None = None, compute_dtype: torch.dtype = torch.float32, seed: int = 3
) -> Decoder:
    """Builds a model on the CPU whose parameters are all non-zero: zero-initialized outputs would hide everything.

    Adds noise of standard deviation 1/(2 sqrt(columns)) to matrices and 0.1 to the rest.

    Args:
        config: a tiny configuration.
        bound: clamps initial values to [-bound, bound] first, so that no gate is nearly closed.
        compute_dtype: dtype of activations.
        seed: seed of the initial weights and the noise.
    """
    model = build_model(config, seed=seed, compute_dtype=compute_dtype)
    for name, parameter in model.named_parameters():
        if bound is not None:
            parameter.clamp_(-bound, bound)
        std = 0.1 if parameter.ndim < 2 else 0.5 * parameter.shape[-1] ** -0.5
        generator = tensor_generator(seed, f"noise:{name}")
        parameter.add_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
    return model


def random_ids(config: ModelConfig, *, rows: int, num_tokens: int | None = None, seed: int = 5) -> Tensor:
    """Returns token ids [rows, num_tokens], int64; the context's length if left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (rows, num_tokens or config.context_tokens), generator=generator)
