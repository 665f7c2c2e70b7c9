"""How a tiny random copy of a configuration behaves: executed work (M2), causality (M4), normalization (M5).

float32 on the CPU, equal shapes on both sides of every comparison, so that equal means equal bits.
Letters: B rows, T tokens, V vocabulary.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nexttransformer import jsonio
from nexttransformer.checking.findings import PART_ERRORS, describe_crash, refusals
from nexttransformer.checking.structure import count_method
from nexttransformer.checking.tiny import build_randomized, random_ids, tiny_copy
from nexttransformer.config import ModelConfig
from nexttransformer.models import Decoder
from nexttransformer.models.layers import Lookup

NUM_TOKENS = 160
# First changed token: next to the start, around the borders of chunks and blocks, and the last one.
CUTS = (1, 63, 64, 65, 127, 128, NUM_TOKENS - 1)
GRADIENT_POSITIONS = (0, 62, 63, 64, 127)
NORMALIZATION_TOLERANCE = 1e-5
NORMALIZATION_TOKENS = 8


@dataclass(frozen=True)
class Behaviour:
    """Problems found, one line each; `crash` says what a part raised, if the copy could not be run."""

    causality: tuple[str, ...] = ()
    distribution: tuple[str, ...] = ()
    crash: str | None = None


def behaviour(config: ModelConfig) -> Behaviour:
    """Examines a tiny copy of a configuration; remembered per configuration."""
    return _examine(jsonio.canonical_bytes(config.to_dict()))


@lru_cache(maxsize=32)
def _examine(content: bytes) -> Behaviour:
    config = ModelConfig.model_validate(jsonio.parse_json(content, "config"))
    tiny = tiny_copy(config).model_copy(update={"context_tokens": NUM_TOKENS})
    causality: list[str] = []
    distribution: list[str] = []
    try:
        model = build_randomized(tiny)
        # A part that depends on the update must hold before, within and after a run.
        for update in (0, 1000, 1_000_000) if model.is_update_dependent else (0,):
            model.set_step(update)
            causality += causality_problems(model)
            distribution += distribution_problems(model)
    except PART_ERRORS as problem:
        return Behaviour(crash=describe_crash("a pass", problem).message)
    return Behaviour(tuple(dict.fromkeys(causality)), tuple(dict.fromkeys(distribution)))


def execution_problems(config: ModelConfig) -> list[str]:
    """Returns where a pass of a tiny copy executes other work than the parts declare; remembered as well."""
    return list(_execution(jsonio.canonical_bytes(config.to_dict())))


@lru_cache(maxsize=32)
def _execution(content: bytes) -> tuple[str, ...]:
    config = ModelConfig.model_validate(jsonio.parse_json(content, "config"))
    return tuple(finding.message for finding in refusals(count_method(config)))


def causality_problems(model: Decoder) -> list[str]:
    """Returns the first cut at which later tokens change earlier logits, and gradients that reach later tokens."""
    ids_BT = random_ids(model.config, rows=1, num_tokens=NUM_TOKENS)
    problems = []
    with torch.no_grad():
        logits_BTV = model(ids_BT)
        for cut in CUTS:
            changed_BT = ids_BT.clone()
            changed_BT[:, cut:] = (changed_BT[:, cut:] + 1) % model.config.vocab_size
            difference = (model(changed_BT)[:, :cut] - logits_BTV[:, :cut]).abs().max().item()
            # Written so that a difference that is not a number fails.
            if not difference == 0:
                problems.append(f"Changing tokens from {cut} on changes earlier logits by {difference:.3g}.")
                break
    return problems + _gradient_problems(model, ids_BT)


def _gradient_problems(model: Decoder, ids_BT: Tensor) -> list[str]:
    """Looks at the gradient of each position's logits to what every table gives for later tokens."""
    outputs: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    tables = [module for module in model.modules() if isinstance(module, Lookup)]
    hooks = [table.register_forward_hook(keep) for table in tables]
    try:
        logits_BTV = model(ids_BT)
    finally:
        for hook in hooks:
            hook.remove()
    for position in GRADIENT_POSITIONS:
        for output in outputs:
            output.grad = None
        logits_BTV[:, position].sum().backward(retain_graph=True)
        for output in outputs:
            later = output.grad[:, position + 1 :] if output.grad is not None else torch.zeros(1)
            if not (later == 0).all():
                return [f"The logits of token {position} have a gradient to the embedding of a later token."]
    return []


@torch.no_grad()
def distribution_problems(model: Decoder) -> list[str]:
    """Sums the probabilities that the loss gives to every id, and changes a row's neighbour."""
    vocab = model.config.vocab_size
    ids_BT = random_ids(model.config, rows=2, num_tokens=NUM_TOKENS)
    problems = []
    prefix_VT = ids_BT[:1, :NORMALIZATION_TOKENS].expand(vocab, -1).contiguous()
    targets_VT = prefix_VT.clone()
    targets_VT[:, -1] = torch.arange(vocab)
    total = torch.logsumexp(-model(prefix_VT, targets_VT)[:, -1].double(), 0).item()
    if not abs(total) <= NORMALIZATION_TOLERANCE:
        problems.append(f"The loss gives the {vocab} ids a log-probability of {total:.3g} in all, expected 0.")
    logits_BTV = model(ids_BT)
    if logits_BTV.shape[-1] != vocab:
        problems.append(f"The model has logits for {logits_BTV.shape[-1]} ids, expected {vocab}.")
    changed_BT = ids_BT.clone()
    changed_BT[1] = (changed_BT[1] + 1) % vocab
    difference = (model(changed_BT)[0] - logits_BTV[0]).abs().max().item()
    if not difference == 0:
        problems.append(f"A row's logits depend on the other row by {difference:.3g}.")
    return problems
