"""Public model API: `build_model`, `config_from_dict`, `list_methods`."""

import torch

from nexttransformer.config import ModelConfig, config_from_dict, method_files
from nexttransformer.models.decoder import Decoder

__all__ = ["Decoder", "build_model", "config_from_dict", "list_methods"]


def list_methods() -> list[str]:
    """Returns the ids of all registered methods (one per shipped configuration)."""
    return list(method_files())


def build_model(
    config: ModelConfig,
    device: str | torch.device = "cpu",
    *,
    seed: int | None = 0,
    compute_dtype: torch.dtype | None = None,
) -> Decoder:
    """Builds a model: on the meta device, then storage on `device`, then its initial weights.

    Args:
        config: expanded configuration.
        device: target device; "meta" returns the model without storage.
        seed: seed of the initial weights; None leaves the storage undefined for strict loading.
        compute_dtype: dtype of products and activations; None means bfloat16 on CUDA, else float32.

    Returns:
        The model, parameters in float32.
    """
    device = torch.device(device)
    if compute_dtype is None:
        compute_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = Decoder(config, compute_dtype)
    if device.type == "meta":
        return model
    model.to_empty(device=device)
    model.prepare(device)
    if seed is not None:
        model.init_weights(seed)
    return model
