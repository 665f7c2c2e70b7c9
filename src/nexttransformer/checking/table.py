"""The figures of checked methods as a text table, a Markdown table and JSON."""

from collections.abc import Sequence
from typing import Any

from nexttransformer.checking.structure import Report
from nexttransformer.protocol import Protocol

SCHEMA = "nexttransformer.check_method/1"
_HEADER = (
    "method",
    "track",
    "layers",
    "MLP width",
    "parameters",
    "matmul",
    "lookup",
    "training FLOPs/token",
    "deviation",
    "decode state/row",
)
_NUM_LEFT_COLUMNS = 2


def sorted_reports(reports: Sequence[Report]) -> list[Report]:
    """Returns the baselines first, then families and methods by name."""
    return sorted(reports, key=lambda report: (report.family != "baseline", report.family, report.method))


def _cells(report: Report) -> tuple[str, ...]:
    if report.budget is None or report.config is None or report.track is None or report.deviation is None:
        return (report.method, "cannot be built", *("-" for _ in _HEADER[2:]))
    budget = report.budget
    return (
        report.method,
        report.track.name,
        str(report.config.num_layers),
        str(report.config.mlp_width),
        f"{budget.num_parameters:,}",
        f"{budget.num_matmul:,}",
        f"{budget.num_lookup:,}",
        f"{budget.training_flops_per_token:,.0f}",
        # No minus sign before a rounded zero.
        f"{round(100 * report.deviation, 2) + 0.0:+.2f} %",
        f"{budget.decode_state_bytes / 1e6:,.1f} MB",
    )


def text_table(reports: Sequence[Report]) -> str:
    """Returns an aligned table, one line per method."""
    rows = [_HEADER, *map(_cells, reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < _NUM_LEFT_COLUMNS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(reports: Sequence[Report]) -> str:
    """Returns the table of `docs/en/methods.md` and `docs/zh/methods.md`; methods link to their files."""
    marks = ["---" if column < _NUM_LEFT_COLUMNS else "---:" for column in range(len(_HEADER))]
    rows = [_HEADER, marks]
    for report in reports:
        name, *rest = _cells(report)
        rows.append((f"[`{name}`](../../configs/{report.family}/{name}.json)", *rest))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def to_json(reports: Sequence[Report], protocol: Protocol) -> dict[str, Any]:
    """Returns the reports as plain JSON data."""
    return {
        "schema": SCHEMA,
        "protocol": protocol.id,
        "protocol_digest": protocol.digest,
        "methods": [_record(report) for report in reports],
    }


def _record(report: Report) -> dict[str, Any]:
    record: dict[str, Any] = {
        "method": report.method,
        "family": report.family,
        "is_passed": report.is_passed,
        "findings": [vars(finding) for finding in report.findings],
    }
    if report.config is not None and report.budget is not None and report.track is not None:
        budget = report.budget
        record |= {
            "config_digest": report.config.digest,
            "num_layers": report.config.num_layers,
            "mlp_width": report.config.mlp_width,
            "num_parameters": budget.num_parameters,
            "num_matmul": budget.num_matmul,
            "num_lookup": budget.num_lookup,
            "training_flops_per_token": budget.training_flops_per_token,
            "flops_deviation_fraction": report.deviation,
            "decode_state_bytes": budget.decode_state_bytes,
            "track": report.track.name,
        }
    return record
