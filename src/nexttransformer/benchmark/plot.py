"""The plot of a benchmark, one SVG without a plotting library: tokens per second, and shares of an update."""

from html import escape
from typing import Any

from nexttransformer.benchmark.kernel_classes import CLASSES
from nexttransformer.benchmark.render import render_text

_WIDTH, _LABEL, _BAR, _ROW, _TOP = 1000, 190, 300, 26, 64
_SHARES_LEFT = 640
_COLOURS = (
    "#0b62b0",
    "#c8500a",
    "#6b4bb8",
    "#a8447f",
    "#007a5a",
    "#2d8fb8",
    "#8a6500",
    "#7aa6c2",
    "#d08c00",
    "#b3261e",
    "#8b949e",
    "#d7dce1",
)
_STYLE = """text { font: 13px system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: #1a1f27; }
.title { font-size: 15px; font-weight: 600; } .back { fill: #ffffff; } .soft { fill: #9fc3e3; } .bar { fill: #0b62b0; }
@media (prefers-color-scheme: dark) { text { fill: #e8ecf0; } .back { fill: #181d23; } .soft { fill: #3c5a75; } }"""


def draw_plot(record: dict[str, Any]) -> str:
    """Returns the SVG: left the tokens/s of steps (wide bar) and updates (thin bar), right the shares of an update."""
    runs = [
        (f"{entry['method']}, {run['micro_batch']} rows", run)
        for entry in record["configurations"]
        for run in entry["runs"]
    ]
    rates = [
        (run.get("step", {}).get("tokens_per_second"), run.get("update", {}).get("tokens_per_second"))
        for _, run in runs
    ]
    largest = max([rate for pair in rates for rate in pair if rate] or [1.0])
    used = [kind for kind in CLASSES if any(kind in _shares(run) for _, run in runs)]
    height = _TOP + _ROW * max(len(runs), 1) + 30 + 20 * (-(-len(used) // 6) if used else 0)
    title = f"{record['settings']['protocol']['id']}, {record['hardware']['device']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{_WIDTH}" height="{height}" rx="12"/>',
        f'<text class="title" x="20" y="28">{escape(title)}: tokens/s of forward and backward; thin: updates</text>',
    ]
    if used:
        parts.append(f'<text class="title" x="{_SHARES_LEFT}" y="48">time of an update</text>')
    for index, ((name, run), (step, update)) in enumerate(zip(runs, rates, strict=True)):
        y = _TOP + _ROW * index
        parts.append(f'<text x="{_LABEL - 10}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        if step:
            parts.append(_rect(_LABEL, y, _BAR * step / largest, 18, "soft"))
        if update:
            parts.append(_rect(_LABEL, y + 6, _BAR * update / largest, 6, "bar"))
        shown = f"{step or update:,.0f}" if step or update else "not measured"
        parts.append(f'<text x="{_LABEL + _BAR + 10}" y="{y + 14}">{shown}</text>')
        parts += _stack(_shares(run), y)
    parts += _legend(used, _TOP + _ROW * max(len(runs), 1) + 20)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _shares(run: dict[str, Any]) -> dict[str, float]:
    return run.get("breakdown", {}).get("update_shares", {})


def _rect(x: float, y: float, width: float, height: float, style: str, fill: str = "", hint: str = "") -> str:
    attribute = f' fill="{fill}"' if fill else f' class="{style}"'
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}"{attribute}>{inside}</rect>'


def _stack(shares: dict[str, float], y: float) -> list[str]:
    parts, x = [], float(_SHARES_LEFT)
    for kind, colour in zip(CLASSES, _COLOURS, strict=True):
        width = (_WIDTH - _SHARES_LEFT - 20) * shares.get(kind, 0.0)
        if width > 0:
            parts.append(_rect(x, y, width, 18, "", colour, f"{kind.replace('_', ' ')} {100 * shares[kind]:.1f} %"))
            x += width
    return parts


def _legend(used: list[str], top: float) -> list[str]:
    parts = []
    for index, kind in enumerate(used):
        x, y = 20 + 160 * (index % 6), top + 20 * (index // 6)
        parts.append(_rect(x, y - 10, 12, 12, "", _COLOURS[CLASSES.index(kind)]))
        parts.append(f'<text x="{x + 18}" y="{y}">{escape(kind.replace("_", " "))}</text>')
    return parts


def plot_page(record: dict[str, Any]) -> str:
    """Returns a page with the plot and the tables."""
    style = "body { margin: 2rem; } pre { overflow-x: auto; } svg { max-width: 100%; height: auto; }"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>bench</title>'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<style>{style}</style></head>\n<body>\n{draw_plot(record)}<pre>{escape(render_text(record))}</pre>\n</body></html>\n"
    )
