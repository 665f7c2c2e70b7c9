"""The exported weights: one safetensors file with the public names, and what a model says with them (check K2)."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nexttransformer.config import ModelConfig
from nexttransformer.data.tokenizer import Tokenizer
from nexttransformer.evaluation.generation import generate_tokens
from nexttransformer.models import Decoder, build_model
from nexttransformer.training.checkpoint_load import EvaluationCheckpoint, load_weights
from nexttransformer.training.safetensors_file import WrittenFile, write_safetensors
from nexttransformer.training.weights_digest import tensor_bytes

DTYPE_RULE = "stored dtypes unchanged"
# Any text does; this one is in no data set by accident only.
PROBE_TEXT = "The history of a river begins where rain falls on stone, and 1,234 naïve birds drink."
MAX_PROBE_TOKENS = 64
PROBE_NEW_TOKENS = 16


@dataclass(frozen=True)
class Probe:
    """What a model says to the fixed prompt: digest of its float32 logits on the CPU, and its greedy continuation."""

    logits_digest: str
    greedy_ids: list[int]


def write_weights(path: Path, checkpoint: EvaluationCheckpoint, *, division: str) -> WrittenFile:
    """Writes the tensors of a checkpoint with their stored dtypes.

    The header says whose they are; `format` is what Transformers asks for.
    """
    marker = checkpoint.marker
    metadata = {
        "format": "pt",
        "dtype_rule": DTYPE_RULE,
        "method": marker.method,
        "mode": marker.mode,
        "division": division,
        "protocol": marker.protocol.id,
        "protocol_digest": marker.protocol.digest,
        "update": str(marker.update),
        "run_id": marker.run_id,
        "weights_digest": marker.weights_digest,
    }
    return write_safetensors(path, checkpoint.tensors, metadata)


def probe_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of the fixed prompt, BOS first."""
    return [tokenizer.bos_id, *tokenizer.encode(PROBE_TEXT)][:MAX_PROBE_TOKENS]


def model_of(config: ModelConfig, update: int) -> Decoder:
    """Returns a model on the CPU in float32 without weights, told how many updates were trained."""
    model = build_model(config, "cpu", seed=None, compute_dtype=torch.float32)
    model.set_step(update)
    return model.eval()


def model_with(config: ModelConfig, update: int, tensors: Mapping[str, Tensor]) -> Decoder:
    """Returns a model with these weights, loaded strictly.

    Raises:
        RuntimeError: names or shapes differ (torch's own message lists them).
    """
    model = model_of(config, update)
    model.load_state_dict(dict(tensors), strict=True)
    return model


def model_from_file(config: ModelConfig, update: int, path: Path) -> Decoder:
    """Returns a model with the weights of a file; CheckpointError listing what differs in name, shape or dtype."""
    model = model_of(config, update)
    load_weights(path, dict(model.named_parameters()))
    return model


def probe(model: Decoder, tokenizer: Tokenizer) -> Probe:
    """Runs the fixed prompt."""
    ids = probe_ids(tokenizer)
    with torch.no_grad():
        logits_BTV = model(torch.tensor([ids]))
    # Generation ends early only at a document's end.
    greedy = generate_tokens(model, ids, max_tokens=PROBE_NEW_TOKENS, temperature=0.0, seed=0, stop_id=tokenizer.bos_id)
    return Probe(hashlib.sha256(tensor_bytes(logits_BTV)).hexdigest(), list(greedy))
