"""Figure specifications as plain data; `templates/figures.js` turns them into plotly figures.

A trace says which run it belongs to and what it is ("raw", "line", "points" or "past" for superseded updates);
colours, axes in updates, tokens or hours, and light or dark are the page's business.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nexttransformer.reporting.noise import BPB_BAND
from nexttransformer.reporting.run_view import RunView
from nexttransformer.reporting.series import half_life, rounded, smooth, thin, thin_noisy
from nexttransformer.training.metrics import MetricsLine

# Protocols whose noise is known (field figures for full-size runs).
NOISE_KNOWN = ("formal-v1",)
# Of runs at least this long, the first view of loss and BPB starts at this fraction.
_LONG_UPDATES, _START_FRACTION = 500, 0.03


@dataclass(frozen=True)
class Figure:
    """One plot. `title`, `y_title` and trace names are keys of the words or names of runs and groups."""

    id: str
    title: str
    y_title: str
    traces: list[dict[str, Any]] = field(default_factory=list)
    is_log: bool = False
    band: float | None = None
    y_range: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for the page's script."""
        return {
            "id": self.id,
            "y_title": self.y_title,
            "traces": self.traces,
            "is_log": self.is_log,
            "band": self.band,
            "y_range": self.y_range,
        }


def _trace(run: int, name: str, kind: str, points: Sequence[tuple[int, float]], **more: Any) -> dict[str, Any]:
    return {
        "run": run,
        "name": name,
        "kind": kind,
        "x": [update for update, _ in points],
        "y": rounded([value for _, value in points]),
        **more,
    }


def _chosen(lines: list[MetricsLine], values: list[float], indices: list[int]) -> list[tuple[int, float]]:
    return [(lines[index].update, values[index]) for index in indices]


def _noisy(
    runs: list[RunView], words: dict[str, str], get: Callable[[MetricsLine], float], *, with_past: bool
) -> list[dict[str, Any]]:
    """Raw and smoothed curves of a quantity of every update; superseded updates of a single run dimmed."""
    traces = []
    for index, run in enumerate(runs):
        lines = run.timeline.effective
        if not lines:
            continue
        values = [get(line) for line in lines]
        label = run.name if len(runs) > 1 else words["smoothed"]
        raw = words["raw"] if len(runs) == 1 else f"{run.name}, {words['raw']}"
        traces.append(_trace(index, raw, "raw", _chosen(lines, values, thin_noisy(values)), legend=len(runs) == 1))
        if with_past and len(runs) == 1:
            for attempt, past in _by_attempt(run.timeline.superseded).items():
                points = _chosen(past, [get(line) for line in past], thin_noisy([get(line) for line in past]))
                name = words["superseded_trace"].format(attempt=attempt)
                traces.append(_trace(index, name, "past", points, legend=True))
        smoothed = smooth(values, half_life(len(values)))
        traces.append(_trace(index, label, "line", _chosen(lines, smoothed, thin(smoothed)), legend=True))
    return traces


def _by_attempt(lines: list[MetricsLine]) -> dict[int, list[MetricsLine]]:
    result: dict[int, list[MetricsLine]] = {}
    for line in lines:
        result.setdefault(line.attempt, []).append(line)
    return result


def _plain(runs: list[RunView], get: Callable[[MetricsLine], float]) -> list[dict[str, Any]]:
    """One smooth curve for each run."""
    traces = []
    for index, run in enumerate(runs):
        lines = run.timeline.effective
        if lines:
            values = [get(line) for line in lines]
            traces.append(_trace(index, run.name, "line", _chosen(lines, values, thin(values)), legend=len(runs) > 1))
    return traces


def learning_rate_traces(runs: list[RunView], group_names: list[list[str]]) -> list[dict[str, Any]]:
    """Every group of a single run; of several runs the first group each (all groups follow one schedule)."""
    traces = []
    for index, run in enumerate(runs):
        names = group_names[index]
        lines = run.timeline.effective
        count = min((len(line.learning_rates) for line in lines), default=0)
        for group in range(count if len(runs) == 1 else min(count, 1)):
            name = names[group] if group < len(names) else f"group {group}"
            values = [line.learning_rates[group] for line in lines]
            label = name if len(runs) == 1 else f"{run.name}: {name}"
            colour = {"colour": group} if len(runs) == 1 else {}
            traces.append(_trace(index, label, "line", _chosen(lines, values, thin(values)), legend=True, **colour))
    return traces


def difference_traces(runs: list[RunView]) -> list[dict[str, Any]]:
    """BPB of each run minus the first one's, at common updates."""
    reference = dict(runs[0].bpb_curve)
    traces = []
    for index, run in enumerate(runs[1:], start=1):
        points = [(update, score - reference[update]) for update, score in run.bpb_curve if update in reference]
        if points:
            traces.append(_trace(index, run.name, "points", points, legend=True))
    return traces


def first_view(traces: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Returns a range that leaves out the steep start of long runs, so that the rest can be read; else None."""
    last = max((trace["x"][-1] for trace in traces), default=0)
    if last < _LONG_UPDATES:
        return None
    seen = [
        y
        for trace in traces
        for x, y in zip(trace["x"], trace["y"], strict=True)
        if trace["kind"] != "past" and x >= _START_FRACTION * last
    ]
    if not seen:
        return None
    margin = 0.04 * (max(seen) - min(seen))
    return min(seen) - margin, max(seen) + margin


def build_figures(runs: list[RunView], group_names: list[list[str]], words: dict[str, str]) -> list[Figure]:
    """Returns the figures that have data, in the order of the page.

    Args:
        runs: the first is the reference of differences.
        group_names: optimizer groups of each run, in order.
        words: translations.
    """
    bpb = [
        _trace(index, run.name, "points", run.bpb_curve, legend=len(runs) > 1)
        for index, run in enumerate(runs)
        if run.bpb_curve
    ]
    is_alike = len({run.protocol.id if run.protocol else None for run in runs}) == 1
    protocol = runs[0].protocol
    band = BPB_BAND if is_alike and protocol is not None and protocol.id in NOISE_KNOWN else None
    loss = _noisy(runs, words, lambda line: line.loss_nats, with_past=True)
    norm = _noisy(runs, words, lambda line: line.gradient_norm, with_past=False)
    speed = _noisy(runs, words, lambda line: line.tokens_per_second, with_past=False)
    rates = learning_rate_traces(runs, group_names)
    difference = difference_traces(runs) if len(runs) > 1 and is_alike else []
    figures = [
        Figure("loss", words["figure_loss"], words["axis_loss"], loss, y_range=first_view(loss)),
        Figure("bpb", words["figure_bpb"], words["axis_bpb"], bpb, y_range=first_view(bpb)),
        Figure("difference", words["figure_difference"], words["axis_difference"], difference, band=band),
        Figure("rates", words["figure_rates"], words["axis_rates"], rates, is_log=True),
        Figure("norm", words["figure_norm"], words["axis_norm"], norm),
        Figure("speed", words["figure_speed"], words["axis_speed"], speed),
        Figure(
            "momentum", words["figure_momentum"], words["axis_momentum"], _plain(runs, lambda line: line.muon_momentum)
        ),
        Figure("decay", words["figure_decay"], words["axis_decay"], _plain(runs, lambda line: line.muon_weight_decay)),
    ]
    return [figure for figure in figures if figure.traces]


def run_axes(runs: list[RunView]) -> list[dict[str, Any]]:
    """What the page needs to draw a run over tokens or hours instead of updates."""
    axes = []
    for run in runs:
        lines, hours = run.timeline.effective, run.hours
        indices = thin(hours)
        axes.append(
            {
                "name": run.name,
                "tokens_per_update": run.tokens_per_update,
                "clock_x": [0, *[lines[index].update for index in indices]],
                "clock_y": [0.0, *rounded([hours[index] for index in indices])],
            }
        )
    return axes
