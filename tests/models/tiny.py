"""The tiny model with closed-form weights of the golden values (section 9.1 of the specification)."""

import numpy as np
import torch

from nexttransformer.config import ModelConfig
from nexttransformer.models import Decoder, build_model

# tensor-name suffix -> (code, scale)
CODES = {
    "wte.weight": (1, 1.0),
    "lm_head.weight": (2, 0.1),
    "attn.c_q.weight": (3, 0.1),
    "attn.c_k.weight": (4, 0.1),
    "attn.c_v.weight": (5, 0.1),
    "attn.c_proj.weight": (6, 0.1),
    "mlp.c_fc.weight": (7, 0.1),
    "mlp.c_proj.weight": (8, 0.05),
    "attn.ve_gate.weight": (9, 0.5),
    "smear_gate.weight": (11, 0.5),
}


def closed_form(shape: tuple[int, ...], code: int, scale: float, layer: int) -> torch.Tensor:
    """Returns scale * (2 frac(43758.5453 sin(code + 20 layer + 12.9898 i + 78.233 j)) - 1), float32."""
    i, j = np.arange(shape[0])[:, None], np.arange(shape[1])[None, :]
    x = 43758.5453 * np.sin(code + 20 * layer + 12.9898 * i + 78.233 * j)
    return torch.from_numpy((scale * (2 * (x - np.floor(x)) - 1)).astype(np.float32))


def tiny_config(windows: list[int | None], *, width: int = 256, heads: int = 2, mlp: int = 1024, vocab: int = 512):
    """Returns a configuration with one attention layer per window."""
    return ModelConfig(
        method="tiny",
        family="test",
        protocol="test-v1",
        width=width,
        num_heads=heads,
        head_dim=width // heads,
        context_tokens=256,
        vocab_size=vocab,
        num_layers=len(windows),
        mlp_type="relu2",
        mlp_width=mlp,
        rope_base=100_000.0,
        qk_gain=1.2,
        logit_soft_cap=15.0,
        layers=[{"type": "attention", "window": window} for window in windows],
        residual={"type": "plain"},
    )


@torch.no_grad()
def fill_closed_form(model: Decoder) -> None:
    """Sets the golden weights; lambda and mu stay at their init values, smear scale 0.3, backout 0.2."""
    for name, parameter in model.named_parameters():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), 0)
        if name.startswith("value_embeds"):
            parameter.copy_(closed_form(tuple(parameter.shape), 10, 0.5, layer))
            continue
        for suffix, (code, scale) in CODES.items():
            if name.endswith(suffix):
                parameter.copy_(closed_form(tuple(parameter.shape), code, scale, layer))
    model.smear_lambda.fill_(0.3)
    model.backout_lambda.fill_(0.2)


def golden_model(windows: list[int | None]) -> Decoder:
    """Returns a golden model with the given windows."""
    model = build_model(tiny_config(windows), seed=0)
    fill_closed_form(model)
    return model


def golden_tokens(num_tokens: int, rows: tuple[int, ...] = (0, 1)) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and targets [B, T] of s(b, t) = (7 + 131 b + 17 t + 3 t^2) mod 512."""
    t = torch.arange(num_tokens + 1)
    ids = torch.stack([(7 + 131 * b + 17 * t + 3 * t * t) % 512 for b in rows])
    return ids[:, :-1], ids[:, 1:]
