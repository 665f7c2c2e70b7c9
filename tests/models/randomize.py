"""Random weights for tests: zero-initialized outputs would hide almost everything."""

import torch

from nexttransformer.config import ModelConfig
from nexttransformer.models import Decoder
from nexttransformer.models.parts import tensor_generator


@torch.no_grad()
def randomize(model: Decoder, seed: int = 3) -> None:
    """Adds noise to every parameter: std 1/(2 sqrt(columns)) for matrices, 0.1 for the rest.

    Small enough that streams do not cancel: float32 rounding then stays far below the tests' tolerances.
    """
    for name, parameter in model.named_parameters():
        std = 0.1 if parameter.ndim < 2 else 0.5 * parameter.shape[-1] ** -0.5
        noise = torch.empty(parameter.shape).normal_(0.0, std, generator=tensor_generator(seed, name))
        parameter.add_(noise)


def random_ids(config: ModelConfig, *, rows: int = 1, seed: int = 5) -> torch.Tensor:
    """Returns token ids [rows, context]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (rows, config.context_tokens), generator=generator)
