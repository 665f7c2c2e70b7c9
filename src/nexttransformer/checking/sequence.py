"""Checks along the sequence and the batch: causality, batch independence, prefix consistency, state passing."""

from collections.abc import Callable

import torch
from torch import Tensor

from nexttransformer.checking.findings import Finding
from nexttransformer.checking.subject import Subject, largest, traced
from nexttransformer.models.state import map_state

# Largest rounding of float32 logits between different shapes of the same computation.
TOLERANCE = 1e-5
STATE_TOLERANCE = 2e-5
# Tokens from which the row is changed: next to the start, around a chunk's border, and the last one.
CAUSAL_CUTS = (1, 63, 64, 65, 127)
PREFIXES = (1, 2, 65)
STATE_CUTS = (1, 50)


def _first_difference(subject: Subject, select: Callable[[Tensor], Tensor], others: list[Tensor], limit: float) -> str:
    """Names the first part whose selected output differs from the one in `others`."""
    for index, (own, other) in enumerate(zip(subject.traces, others, strict=True)):
        if largest(select(own), select(other)) > limit:
            layer = index // 2
            kind = f"mixer '{subject.config.layers[layer]['type']}'" if index % 2 == 0 else "MLP"
            return f"seen first in the {kind} of layer {layer}"
    return f"not in a mixer or MLP: look at the residual scheme '{subject.config.residual['type']}'"


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
