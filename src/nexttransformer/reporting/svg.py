"""A static plot of loss and validation BPB as one SVG file, written without a plotting library.

For README files and for readers without JavaScript. Light and dark follow the reader's system.
"""

import math
from collections.abc import Sequence
from html import escape

from nexttransformer.reporting.run_view import RunView
from nexttransformer.reporting.series import half_life, smooth, thin, thin_noisy

Points = list[tuple[float, float]]

WIDTH, HEIGHT = 1000, 380
_PANEL_WIDTH, _PANEL_HEIGHT = 420, 270
_TOP, _LEFT, _GAP = 62, 62, 78
_MAX_POINTS = 400
_LIGHT = ("#0b62b0", "#c8500a", "#007a5a", "#a8447f", "#8a6500", "#2d8fb8", "#6b4bb8", "#5b6470")
_DARK = ("#5fb0f5", "#ff9d5c", "#3fd0a4", "#ef9ccd", "#e8c34c", "#8ddcf7", "#bfa6ff", "#b4bec8")
_DASHES = ("", "7 4", "2 3", "8 3 2 3", "11 4", "11 3 2 3", "", "7 4")
_STYLE = """
text {
  font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Noto Sans CJK SC", sans-serif; fill: #1a1f27;
}
.title { font-size: 15px; font-weight: 600; } .soft { fill: #59636f; }
.back { fill: #ffffff; } .grid { stroke: #e6eaee; } .axis { stroke: #aab3bd; }
path { fill: none; stroke-linejoin: round; } .line { stroke-width: 2.2; } .raw { stroke-width: 1; opacity: .32; }
.past { stroke: #a2abb5; stroke-width: 1.5; stroke-dasharray: 2 3; }
""" + "".join(
    f".c{index} {{ stroke: {colour}; }} .f{index} {{ fill: {colour}; }}\n" for index, colour in enumerate(_LIGHT)
)
_DARK_STYLE = (
    "text { fill: #e8ecf0; } .soft { fill: #a2adb9; } .back { fill: #181d23; } .grid { stroke: #2a323a; }"
    " .axis { stroke: #56606b; } .past { stroke: #6d7782; }\n"
    + "".join(
        f".c{index} {{ stroke: {colour}; }} .f{index} {{ fill: {colour}; }}\n" for index, colour in enumerate(_DARK)
    )
)


def ticks(low: float, high: float, count: int = 7) -> list[float]:
    """Returns round values that cover [low, high] inside: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


class _Panel:
    """One pair of axes; data coordinates to pixels."""

    def __init__(self, left: float, curves: Sequence[Points]) -> None:
        everything = [point for curve in curves for point in curve]
        self.left = left
        self.x_high = max((x for x, _ in everything), default=1.0) or 1.0
        low, high = min(y for _, y in everything), max(y for _, y in everything)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        self.y_low, self.y_high = low - margin, high + margin

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Returns pixels of a point."""
        across = x / self.x_high
        up = (y - self.y_low) / (self.y_high - self.y_low)
        return self.left + across * _PANEL_WIDTH, _TOP + (1 - up) * _PANEL_HEIGHT

    def axes(self, title: str, unit: str, x_title: str) -> list[str]:
        """Returns grid, axes and texts."""
        parts = [f'<text class="title" x="{self.left:g}" y="{_TOP - 14}">{escape(title)}']
        parts[0] += f'<tspan class="soft" font-weight="400" font-size="13" dx="8">{escape(unit)}</tspan></text>'
        bottom = _TOP + _PANEL_HEIGHT
        for value in ticks(self.y_low, self.y_high):
            _, y = self.place(0, value)
            parts.append(
                f'<line class="grid" x1="{self.left:g}" x2="{self.left + _PANEL_WIDTH:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(
                f'<text class="soft" x="{self.left - 8:g}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>'
            )
        parts.append(
            f'<line class="axis" x1="{self.left:g}" x2="{self.left + _PANEL_WIDTH:g}" y1="{bottom}" y2="{bottom}"/>'
        )
        for value in ticks(0, self.x_high):
            x, _ = self.place(value, self.y_low)
            parts.append(f'<text class="soft" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:,.6g}</text>')
        middle = self.left + _PANEL_WIDTH / 2
        parts.append(
            f'<text class="soft" x="{middle:g}" y="{bottom + 38}" text-anchor="middle">{escape(x_title)}</text>'
        )
        return parts

    def path(self, points: Points, classes: str, dash: str = "") -> str:
        """Returns a curve."""
        places = [self.place(x, y) for x, y in points]
        steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        style = f' stroke-dasharray="{dash}"' if dash else ""
        return f'<path class="{classes}"{style} d="M{steps}"/>'

    def dots(self, points: Points, index: int) -> str:
        """Returns a marker for each point of a short curve."""
        if len(points) > 40:
            return ""
        places = [self.place(x, y) for x, y in points]
        return "".join(f'<circle class="f{index}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>' for x, y in places)


def draw_svg(runs: Sequence[RunView], words: dict[str, str]) -> str:
    """Returns the SVG text: training loss left, validation BPB right, one colour and dash for each run."""
    raw, smoothed, past = [], [], []
    for run in runs:
        lines = run.timeline.effective
        values = [line.loss_nats for line in lines]
        average = smooth(values, half_life(len(values)))
        raw.append([(float(lines[i].update), values[i]) for i in thin_noisy(values, _MAX_POINTS)])
        smoothed.append([(float(lines[i].update), average[i]) for i in thin(average, _MAX_POINTS)])
        old: dict[int, Points] = {}
        for line in run.timeline.superseded if len(runs) == 1 else []:
            old.setdefault(line.attempt, []).append((float(line.update), line.loss_nats))
        past += list(old.values())
    curves = [[(float(update), score) for update, score in run.bpb_curve] for run in runs]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' role="img" aria-label="{escape(words["figure_loss"])}, {escape(words["figure_bpb"])}">',
        f"<style>{_STYLE}@media (prefers-color-scheme: dark) {{ {_DARK_STYLE} }}</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="12"/>',
        *_legend(runs),
    ]
    if any(raw):
        panel = _Panel(_LEFT, raw + past)
        parts += panel.axes(words["figure_loss"], words["axis_loss"], words["x_update"])
        parts += [panel.path(points, "past") for points in past if points]
        for index, (each, average) in enumerate(zip(raw, smoothed, strict=True)):
            if each:
                parts.append(panel.path(each, f"raw c{index % 8}"))
                parts.append(panel.path(average, f"line c{index % 8}", _DASHES[index % 8]))
    if any(curves):
        panel = _Panel(_LEFT + _PANEL_WIDTH + _GAP, curves)
        parts += panel.axes(words["figure_bpb"], words["axis_bpb"], words["x_update"])
        for index, points in enumerate(curves):
            if points:
                parts.append(panel.path(points, f"line c{index % 8}", _DASHES[index % 8]))
                parts.append(panel.dots(points, index % 8))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(runs: Sequence[RunView]) -> list[str]:
    parts, x = [], float(_LEFT)
    for index, run in enumerate(runs):
        dash = _DASHES[index % 8]
        style = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<path class="line c{index % 8}"{style} d="M{x:g} 20h26"/>')
        parts.append(f'<text x="{x + 34:g}" y="24">{escape(run.name)}</text>')
        x += 60 + 8 * len(run.name)
    return parts
