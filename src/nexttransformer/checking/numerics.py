"""Checks of precision, determinism and the start: bfloat16 outputs and state, equal seeds, the plain first loss."""

import math
from typing import Any

import torch
from torch import Tensor

from nexttransformer.checking.findings import Finding
from nexttransformer.checking.subject import Subject, largest, traced, watched
from nexttransformer.checking.tiny import build_randomized
from nexttransformer.models import build_model
from nexttransformer.models.state import map_state
from nexttransformer.registry import load_part

# A mean over depth shrinks the stream to where the epsilon of the norms shows.
START_TOLERANCE = 2e-4
START_LOSS_TOLERANCE = 0.01


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
