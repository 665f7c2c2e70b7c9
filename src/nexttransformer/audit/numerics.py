"""N1 to N3: finite numbers, the first loss, spikes, and curves that ask for a human's eye."""

import math
from collections.abc import Iterator

import numpy as np

from nexttransformer.audit import reader
from nexttransformer.audit.bpb_rules import bpb_of
from nexttransformer.audit.cell import readable
from nexttransformer.audit.check import Finding, check, error, warning
from nexttransformer.audit.run_view import RunView
from nexttransformer.evaluation.bpb import IMPLAUSIBLE_BPB
from nexttransformer.training.guards import SPIKE_DEVIATIONS, SPIKE_WINDOW

FIRST_LOSS_TOLERANCE = 0.5
# The trainer's counter waits for a full window; the audit also looks at the start of a run.
MIN_SPIKE_WINDOW = 8
MIN_FORMAL_RECORDS = 3
# How far outside the records' envelope a curve may run before a human is asked, relative.
ENVELOPE_MARGIN = 0.02


@check("N1")
def check_losses(view: RunView) -> Iterator[Finding]:
    """Finite losses and norms, and the loss of a model that knows nothing at the start."""
    metrics, timeline = view.metrics.get(), view.timeline
    for key in ("loss_nats", "gradient_norm"):
        values = getattr(metrics, key)
        for index in np.flatnonzero(~(np.isfinite(values) & (values >= 0))):
            yield error(
                f"{key} is no finite positive number.", metrics.where(index, key), got=repr(float(values[index]))
            )
    first = timeline.line_of[1]
    if first >= 0:
        expected, got = math.log(view.reference.protocol.vocab_size), float(metrics.loss_nats[first])
        if not abs(got - expected) <= FIRST_LOSS_TOLERANCE:
            wanted = f"{expected:.3f} within {FIRST_LOSS_TOLERANCE}"
            yield error(
                "The first loss is not that of a model that knows nothing.",
                metrics.where(first, "loss_nats"),
                expected=wanted,
                got=got,
            )


@check("N2")
def check_spikes(view: RunView) -> Iterator[Finding]:
    """Losses far above those before them."""
    metrics, lines = view.metrics.get(), view.timeline.lines
    losses = metrics.loss_nats[lines]
    # Mean and deviation over the last 128 losses before each update, by running sums around a common level.
    level = float(losses.mean()) if len(losses) else 0.0
    sums = np.concatenate([[0.0], np.cumsum(losses - level)])
    squares = np.concatenate([[0.0], np.cumsum((losses - level) ** 2)])
    ends = np.arange(len(losses))
    starts = np.maximum(0, ends - SPIKE_WINDOW)
    counts = np.maximum(1, ends - starts)
    means = (sums[ends] - sums[starts]) / counts
    deviations = np.sqrt(np.maximum(0.0, (squares[ends] - squares[starts]) / counts - means**2))
    limits = level + means + SPIKE_DEVIATIONS * deviations
    for position in np.flatnonzero((ends >= MIN_SPIKE_WINDOW) & (losses > limits)):
        where = metrics.where(lines[position], "loss_nats")
        yield warning("A loss spike.", where, expected=f"at most {limits[position]:.4f}", got=float(losses[position]))


@check("N3")
def check_curves(view: RunView) -> Iterator[Finding]:
    """Implausibly good values, and curves outside the envelope of the formal records."""
    values, missing = readable({name: cell for name, cell in view.evaluations.items() if name in view.files.entries})
    curve = {}
    for name, record in values.items():
        for split, score in record.bpb.items():
            bpb = bpb_of(score)
            if split == "val_curve" and record.kind == "val_curve":
                curve[record.update] = (name, bpb)
            if not bpb >= IMPLAUSIBLE_BPB:
                yield warning(
                    "An implausible BPB: does the model see the future?",
                    f"{name} bpb.{split}",
                    expected=f"at least {IMPLAUSIBLE_BPB}",
                    got=bpb,
                )
    yield from missing
    records = _formal_curves(view)
    if len(records) < MIN_FORMAL_RECORDS:
        return
    for update, (name, bpb) in curve.items():
        others = [other[update] for other in records if update in other]
        if others and not (1 - ENVELOPE_MARGIN) * min(others) <= bpb <= (1 + ENVELOPE_MARGIN) * max(others):
            wanted = f"{min(others):.4f} to {max(others):.4f} as in {len(others)} records"
            yield warning(
                "The BPB curve is outside the envelope of the formal records.", name, expected=wanted, got=bpb
            )


def _formal_curves(view: RunView) -> list[dict[int, float]]:
    """Returns {update: bpb} of every published formal record; unreadable ones are another check's business."""
    folder, curves = view.reference.evidence, []
    if folder is None or view.reference.division != "formal" or not folder.is_dir():
        return curves
    for path in sorted(folder.glob("*.json")):
        try:
            value = reader.parse_json(reader.read_bytes(path))
            if value["protocol"]["id"] == view.reference.protocol.id and value["method"] != view.method:
                curves.append({int(update): float(bpb) for update, bpb in value["results"]["bpb_curve"]})
        except (reader.Malformed, KeyError, TypeError, ValueError):
            continue
    return curves
