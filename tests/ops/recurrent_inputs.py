"""Seeded inputs of the delta rules, and outputs with every gradient."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as functional

NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")


def delta_inputs(
    num_tokens: int,
    *,
    key_dim: int = 16,
    value_dim: int = 24,
    per_channel: bool,
    strong: bool = False,
    dtype: torch.dtype = torch.float32,
    rows: int = 2,
    heads: int = 2,
) -> list[torch.Tensor]:
    """Returns q, k, v, g, beta and an initial state, leaves that require a gradient."""
    generator = torch.Generator().manual_seed(1000 * num_tokens + strong)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (functional.normalize(draw(rows, num_tokens, heads, key_dim), dim=-1) for _ in range(2))
    v = draw(rows, num_tokens, heads, value_dim)
    beta = torch.sigmoid(draw(rows, num_tokens, heads))
    raw = draw(rows, num_tokens, heads, *([key_dim] if per_channel else []))
    # Strong: about -20 per token, so that a chunk decays by e^-1000. Weak: about -0.05.
    g = -10 * functional.softplus(raw + 2) if strong else -functional.softplus(raw - 3)
    state = draw(rows, heads, key_dim, value_dim)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta, state)]


def outputs_and_gradients(function: Callable, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns outputs and the gradients of a random linear loss on output and final state, by NAMES."""
    o, state = function(*inputs[:5], initial_state_BHKV=inputs[5])
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (o, state)]
    return dict(zip(NAMES, [o, state, *torch.autograd.grad((o, state), inputs, weights)], strict=True))
