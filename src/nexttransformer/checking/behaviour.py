"""Behaviour of a tiny copy with random weights: no look ahead, rows and passes independent, every parameter trained.

Each check returns findings with the largest deviation and the first layer that shows it. float32 on the CPU, where
equal shapes give equal bits.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nexttransformer.checking.findings import PART_ERRORS, Finding, describe_crash
from nexttransformer.checking.gradients import check_gradients
from nexttransformer.checking.tiny import build_randomized, random_ids, tiny_copy
from nexttransformer.config import ModelConfig
from nexttransformer.models import Decoder, build_model
from nexttransformer.models.state import map_state
from nexttransformer.registry import load_part

# Largest rounding of float32 logits between different shapes of the same computation.
TOLERANCE = 1e-5
STATE_TOLERANCE = 2e-5
# A mean over depth shrinks the stream to where the epsilon of the norms shows.
START_TOLERANCE = 2e-4
START_LOSS_TOLERANCE = 0.01
# Tokens from which the row is changed: next to the start, around a chunk's border, and the last one.
CAUSAL_CUTS = (1, 63, 64, 65, 127)
PREFIXES = (1, 2, 65)
STATE_CUTS = (1, 50)


@dataclass(frozen=True)
class Subject:
    """A randomized tiny model, two rows of ids and their outputs: logits, and the output of each mixer and MLP."""

    config: ModelConfig
    model: Decoder
    ids_BT: Tensor
    logits_BTV: Tensor
    traces: list[Tensor]


def check_behaviour(config: ModelConfig) -> list[Finding]:
    """Checks a tiny copy of a configuration at its own initial weights and with random ones.

    Returns:
        One finding per violated property; a part that raises gives the finding "crash".
    """
    tiny = tiny_copy(config)
    try:
        model = build_randomized(tiny)
    except PART_ERRORS as error:
        return [describe_crash("building a tiny copy", error)]
    findings: dict[Finding, None] = {}
    # A step-dependent part must hold everywhere: before, within and at the end of a run.
    for update in (0, 1000, 1_000_000) if model.is_update_dependent else (0,):
        model.set_step(update)
        ids_BT = random_ids(tiny, rows=2)
        try:
            subject = Subject(tiny, model, ids_BT, *traced(model, ids_BT))
        except PART_ERRORS as error:
            return [describe_crash("a forward pass", error)]
        for what, check in _CHECKS.items():
            try:
                findings.update(dict.fromkeys(check(subject)))
            except PART_ERRORS as error:
                findings[describe_crash(what, error)] = None
    return list(findings)


@contextmanager
def watched(model: Decoder) -> Iterator[list[Tensor]]:
    """Gives a list that fills with the outputs of mixer and MLP of each layer, in order, while the model runs."""
    outputs: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    hooks = [part.register_forward_hook(keep) for block in model.blocks for part in (block.attn, block.mlp)]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def traced(model: Decoder, ids_BT: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns logits and the watched outputs."""
    with watched(model) as outputs:
        return model(ids_BT), outputs


def _first_difference(subject: Subject, select: Callable[[Tensor], Tensor], others: list[Tensor], limit: float) -> str:
    """Names the first part whose selected output differs from the one in `others`."""
    for index, (own, other) in enumerate(zip(subject.traces, others, strict=True)):
        if largest(select(own), select(other)) > limit:
            layer = index // 2
            kind = f"mixer '{subject.config.layers[layer]['type']}'" if index % 2 == 0 else "MLP"
            return f"seen first in the {kind} of layer {layer}"
    return f"not in a mixer or MLP: look at the residual scheme '{subject.config.residual['type']}'"


def largest(first: Tensor, second: Tensor) -> float:
    """Returns the largest absolute difference; infinite if it is not a number."""
    difference = (first.float() - second.float()).abs().max().item() if first.numel() else 0.0
    return difference if math.isfinite(difference) else math.inf


def check_causality(subject: Subject) -> list[Finding]:
    """Changing tokens from t on leaves every earlier logit equal, bit for bit."""
    for t in CAUSAL_CUTS:
        changed_BT = subject.ids_BT.clone()
        changed_BT[:, t:] = (changed_BT[:, t:] + 1) % subject.config.vocab_size
        logits_BTV, traces = traced(subject.model, changed_BT)
        difference = largest(logits_BTV[:, :t], subject.logits_BTV[:, :t])
        if difference > 0:
            where = _first_difference(subject, lambda x, t=t: x[:, :t], traces, 0.0)
            text = (
                f"changing tokens from {t} on changes earlier logits by up to {difference:.3g}, expected 0; {where}. "
                f"Output t may use tokens up to t only: check masks, padding and sums over time."
            )
            return [Finding("causality", text)]
    return []


def check_batch_independence(subject: Subject) -> list[Finding]:
    """A row alone equals the row in a batch, and swapped rows give swapped outputs."""
    for rows in ([1], [1, 0]):
        logits_BTV, traces = traced(subject.model, subject.ids_BT[rows])
        difference = largest(logits_BTV, subject.logits_BTV[rows])
        if difference > TOLERANCE:
            # The traces of the other pass already hold the selected rows.
            full = [trace[rows] for trace in subject.traces]
            selected = Subject(subject.config, subject.model, subject.ids_BT, subject.logits_BTV, full)
            where = _first_difference(selected, lambda x: x, traces, TOLERANCE)
            text = (
                f"a row's logits depend on the other rows by up to {difference:.3g}, expected at most {TOLERANCE:g}; "
                f"{where}. Rows are independent texts: no mean, norm or sort may run over the batch."
            )
            return [Finding("batch independence", text)]
    return []


def check_prefixes(subject: Subject) -> list[Finding]:
    """The first t tokens alone give the logits of the whole row cut at t."""
    for t in PREFIXES:
        with torch.no_grad():
            difference = largest(subject.model(subject.ids_BT[:, :t]), subject.logits_BTV[:, :t])
        if difference > TOLERANCE:
            text = (
                f"the first {t} tokens alone give logits that differ from the whole row's by up to {difference:.3g}, "
                f"expected at most {TOLERANCE:g}. Any length must work, and nothing may depend on the length."
            )
            return [Finding("prefix consistency", text)]
    return []


@torch.no_grad()
def check_state_passing(subject: Subject) -> list[Finding]:
    """A sequence fed in parts with the state handed over equals the whole; the state's first dimension is the batch."""
    model, swapped = subject.model, [1, 0]
    first, second, third = torch.tensor_split(subject.ids_BT, STATE_CUTS, dim=1)
    hidden, state = [], None
    for part in (first, second):
        h_BTD, state = model.hidden(part, state=state, want_state=True)
        hidden.append(h_BTD)
    missing = [layer for layer, each in enumerate(state.mixers if state is not None else ()) if each is None]
    if missing:
        kind = subject.config.layers[missing[0]]["type"]
        text = f"mixer '{kind}' returns no state for want_state=True. Return all that it carries from token to token."
        return [Finding("state passing", text)]
    # The rows change places for the last part, and so must their state.
    h_BTD, _ = model.hidden(third[swapped], state=map_state(lambda tensor: tensor[swapped], state))
    logits_BTV = model.head_logits(torch.cat([*hidden, h_BTD[swapped]], dim=1))
    for start, stop in zip((0, *STATE_CUTS), (*STATE_CUTS, logits_BTV.shape[1]), strict=True):
        difference = largest(logits_BTV[:, start:stop], subject.logits_BTV[:, start:stop])
        if difference > STATE_TOLERANCE:
            text = (
                f"tokens {start} to {stop - 1} fed after the state of the earlier ones give logits that differ from "
                f"the whole row's by up to {difference:.3g}, expected at most {STATE_TOLERANCE:g}. The state must hold "
                f"all that earlier tokens leave (recurrent state, keys, convolution inputs), batch first."
            )
            return [Finding("state passing", text)]
    return []


def _state_bytes(state: Any) -> int:
    """Returns the bytes of all tensors of a mixer's state."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_state(collect, state)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def check_bfloat16(subject: Subject) -> list[Finding]:
    """Mixers give bfloat16 in a bfloat16 model, and the declared decode-state bytes are those of a full row's state."""
    model = build_model(subject.config, compute_dtype=torch.bfloat16)
    with watched(model) as outputs:
        _, state = model.hidden(subject.ids_BT[:1], want_state=True)
    assert state is not None
    for output, options in zip(outputs[::2], subject.config.layers, strict=True):
        if output.dtype != torch.bfloat16:
            text = (
                f"mixer '{options['type']}' returns {output.dtype} in a bfloat16 model, which slows all that follows. "
                f"Compute in float32 where needed and return y.to(x.query.dtype)."
            )
            return [Finding("precision", text)]
    num_tokens = subject.config.context_tokens
    for layer, (block, mixer_state) in enumerate(zip(model.blocks, state.mixers, strict=True)):
        kept = _state_bytes(mixer_state)
        declared = block.attn.decode_state_bytes(num_tokens)
        if kept != declared:
            text = (
                f"mixer '{subject.config.layers[layer]['type']}' keeps {kept:,} bytes a row after {num_tokens} "
                f"tokens of a tiny copy, decode_state_bytes declares {declared:,}. Correct the declaration."
            )
            return [Finding("decode state", text)]
    return []


def check_determinism(subject: Subject) -> list[Finding]:
    """Equal seeds give equal weights, and equal inputs give equal logits, bit for bit."""
    again = build_randomized(subject.config)
    for (name, parameter), other in zip(subject.model.named_parameters(), again.parameters(), strict=True):
        if not torch.equal(parameter, other):
            text = f"{name}: two models of one seed differ. Draw initial values from the generator that init receives."
            return [Finding("determinism", text)]
    difference = largest(traced(subject.model, subject.ids_BT)[0], subject.logits_BTV)
    if difference > 0:
        text = f"two equal passes differ by up to {difference:.3g}, expected 0. Nothing may be drawn in forward."
        return [Finding("determinism", text)]
    return []


@torch.no_grad()
def check_start(subject: Subject) -> list[Finding]:
    """At its own initial weights a method equals the base, and the first loss is ln V."""
    config = subject.config
    attention = {"type": "attention", **load_part("mixer", "attention").Options().model_dump()}
    base = config.model_copy(update={"layers": [attention] * config.num_layers, "residual": {"type": "plain"}})
    own, expected = (build_model(each, seed=1)(subject.ids_BT) for each in (config, base))
    findings = []
    difference = largest(own, expected)
    if difference > START_TOLERANCE:
        text = (
            f"at the initial weights logits differ from the plain Transformer's by up to {difference:.3g}, expected at "
            f"most {START_TOLERANCE:g}. Start output projections at zero and new residual paths at the plain one."
        )
        findings.append(Finding("start", text))
    loss = torch.nn.functional.cross_entropy(own[:, :-1].flatten(0, 1), subject.ids_BT[:, 1:].flatten()).item()
    uniform = math.log(config.vocab_size)
    # Written so that a loss that is not a number fails.
    if not abs(loss - uniform) <= START_LOSS_TOLERANCE:
        text = f"the first loss is {loss:.4f}, expected ln V = {uniform:.4f} within {START_LOSS_TOLERANCE}."
        findings.append(Finding("start", text))
    return findings


_CHECKS: dict[str, Callable[[Subject], list[Finding]]] = {
    "the pass with later tokens changed": check_causality,
    "the pass of single rows": check_batch_independence,
    "the pass of short prefixes": check_prefixes,
    "feeding in parts": check_state_passing,
    "the bfloat16 pass with state": check_bfloat16,
    "the repeated pass": check_determinism,
    "the pass at the initial weights": check_start,
    "the backward pass": lambda subject: check_gradients(subject.config),
}
