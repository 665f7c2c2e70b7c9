"""Renders the report: one self-contained HTML file that needs no network."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nexttransformer import __version__
from nexttransformer.reporting import details, formats, summary
from nexttransformer.reporting.figures import NOISE_KNOWN, build_figures, run_axes
from nexttransformer.reporting.noise import BPB_BAND
from nexttransformer.reporting.run_view import RunView
from nexttransformer.reporting.series import MAX_POINTS
from nexttransformer.reporting.svg import draw_svg
from nexttransformer.reporting.tolerant import dig
from nexttransformer.reporting.words import words_of

TEMPLATES = Path(__file__).parent / "templates"
_MAX_PROBLEMS = 20


@functools.lru_cache
def environment(*folders: Path) -> jinja2.Environment:
    """Returns a strict template environment that escapes everything, over the shared and the given folders."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(
        count=formats.count,
        short=formats.short,
        decimals=formats.decimals,
        signed=formats.signed,
        percent=formats.percent,
        points=formats.points,
        script_json=script_json,
    )
    return made


def script_json(value: Any) -> Markup:
    """Returns a JSON value that may stand inside a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028"))


def plotly_script() -> Markup:
    """Returns the plotly.js that ships with the installed plotly."""
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())


def render_report(runs: Sequence[RunView], language: str) -> str:
    """Returns the page of one or several runs.

    Args:
        runs: the first is the reference of differences.
        language: "en" or "zh".
    """
    runs = list(runs)
    words = words_of(language)
    names = [summary.group_names(run) for run in runs]
    figures = build_figures(runs, names, words)
    protocols = {run.protocol.id if run.protocol else None for run in runs}
    is_alike, is_noise_known = len(protocols) == 1, protocols <= set(NOISE_KNOWN)
    title = words["compare_title"].format(number=len(runs)) if len(runs) > 1 else runs[0].name
    return (
        environment()
        .get_template("report.html")
        .render(
            language=language,
            w=words,
            title=title,
            version=__version__,
            runs=[_run_context(run, index, words) for index, run in enumerate(runs)],
            comparison=summary.comparison(runs, words) if len(runs) > 1 else [],
            core_rows=details.core_rows(runs, words),
            is_core_limited=any(run.core is not None and run.core.core_v1 is None for run in runs),
            is_alike=is_alike,
            is_noise_known=is_noise_known,
            band=f"{BPB_BAND:.2g}",
            max_points=MAX_POINTS,
            figures=figures,
            figure_data={"figures": [figure.to_json() for figure in figures], "runs": run_axes(runs)},
            static_plot=Markup(draw_svg(runs, words)) if figures else "",
            plotly_script=plotly_script() if figures else "",
            formats=formats,
        )
    )


def _run_context(run: RunView, index: int, words: dict[str, str]) -> dict[str, Any]:
    events, num_events = details.notable_events(run)
    last = run.last_update
    return {
        "index": index,
        "view": run,
        "method": dig(run.facts, "method", str) or run.name,
        "family": dig(run.facts, "family", str) or "",
        "protocol": dig(run.facts, "protocol.id", str) or "",
        "mode": dig(run.facts, "mode", str) or "",
        "status": words[f"status_{run.status}"],
        "progress": min(1.0, run.timeline.last_update / last) if last else None,
        "cards": summary.key_figures(run, words),
        "attempts": details.attempt_rows(run, words),
        "evaluations": details.evaluation_rows(run, words),
        "events": events,
        "num_events": num_events,
        "environment": details.environment(run, words),
        "digests": details.digests(run, words),
        "optimizer": details.optimizer_rows(run),
        "config": json.dumps(run.facts.get("config", {}), indent=1, ensure_ascii=False),
        "problems": run.problems[:_MAX_PROBLEMS],
        "num_problems": len(run.problems),
        "num_passed": sum(state in ("pass", "warn") for state in run.audit.checks.values()) if run.audit else 0,
    }
