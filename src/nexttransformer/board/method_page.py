"""What a method's page shows of its record: cards, chart data, tasks, training, audit, credits."""

from typing import Any

from nexttransformer.audit.waivers import Waiver
from nexttransformer.board.rank import REFERENCE_METHOD, Ranked
from nexttransformer.board.records import FORMAL, Record
from nexttransformer.board.tables import rank_text
from nexttransformer.export.record import AttemptOfRecord
from nexttransformer.reporting import formats

_START_FRACTION, _LONG_UPDATES = 0.03, 500


def method_cards(record: Record, row: Ranked | None, words: dict[str, str]) -> list[tuple[str, str, str]]:
    """Returns the cards on top of a method's page: label, value, remark."""
    model = record.facts.model
    rank, remark, to_reference = formats.NOTHING, record.facts.track, ""
    if row is not None:
        rank = rank_text(row)
        remark = words["tie_with"].format(methods=", ".join(row.ties)) if row.ties else ""
        if row.difference is not None and record.method != REFERENCE_METHOD:
            to_reference = words["to_reference"].format(difference=formats.signed(row.difference, 4))
            if row.is_tie_with_reference and record.division == FORMAL:
                to_reference += f" ({words['tie']})"
    if record.core_v1 is not None:
        core, core_note = formats.points(record.core_v1), f"core_v2 {formats.points(record.core_v2)}"
    else:
        core = formats.points(record.core_limited)
        core_note = "" if record.core_limited is None else words["core_limited_note"]
    gpus = dict.fromkeys(_devices(attempt) for attempt in record.attempts)
    return [
        (words["rank"], rank, remark),
        ("BPB", formats.decimals(record.bpb, 4), to_reference),
        ("CORE", core, core_note),
        (words["parameters"], formats.millions(model.num_parameters), ""),
        (
            words["flops"],
            formats.short(model.training_flops_per_token, 4),
            f"{formats.signed(100 * (model.flops_ratio - 1), 2)} %",
        ),
        (words["speed"], formats.count(record.tokens_per_second), ", ".join(gpus)),
    ]


def _devices(attempt: AttemptOfRecord) -> str:
    return ", ".join(f"{number} x {name}" for name, number in sorted(attempt.gpus.items()))


def clipped(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Leaves out the steep start of long curves."""
    last = points[-1][0] if points else 0
    return [point for point in points if point[0] >= _START_FRACTION * last] if last > _LONG_UPDATES else points


def method_charts(record: Record, reference: Record | None, words: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the data of a method's charts: BPB (with the reference) and CORE during training."""
    lines = []
    if reference is not None and reference is not record:
        lines.append({"name": reference.name, "colour": 7, "points": clipped(reference.bpb_curve)})
    lines.append({"name": record.name, "colour": 0, "points": clipped(record.bpb_curve)})
    charts = []
    if record.bpb_curve:
        charts.append({"id": "bpb", "lines": lines, "x": words["updates"], "y": words["bpb_unit"], "digits": 4})
    core = [(update, 100 * value) for update, value, _ in record.core_curve if value is not None]
    if len(core) > 1:
        base = reference.core_curve if reference is not None and reference is not record else []
        lines = [{"name": record.name, "colour": 0, "points": core}]
        if base and reference is not None:
            points = [(update, 100 * value) for update, value, _ in base if value is not None]
            lines.insert(0, {"name": reference.name, "colour": 7, "points": points})
        charts.append({"id": "core", "lines": lines, "x": words["updates"], "y": "CORE x 100", "digits": 2})
    return charts


def task_rows(record: Record) -> list[dict[str, Any]]:
    """Returns the per-task table."""
    return [
        {
            "label": task.label,
            "correct": f"{task.num_correct:,} / {task.rows:,}",
            "fraction": task.num_correct / task.rows,
            "accuracy": formats.percent(task.num_correct / task.rows),
            "centered_v1": formats.points(task.centered_v1),
            "centered_v2": formats.points(task.centered_v2),
        }
        for task in record.tasks
        if task.rows
    ]


def training_facts(record: Record, words: dict[str, str]) -> list[tuple[str, str]]:
    """Returns what is known of model and training."""
    model, training = record.facts.model, record.facts.training
    rows = [
        (words["parameters"], formats.count(model.num_parameters)),
        (words["lookup"], formats.count(model.num_lookup)),
        (words["matmul"], formats.count(model.num_matmul)),
        (words["flops"], formats.count(model.training_flops_per_token)),
        (words["decode_state"], formats.data_bytes(model.decode_state_bytes)),
        (words["covered"], formats.count(training.num_updates)),
        (words["tokens"], formats.count(training.tokens)),
        (words["seed"], formats.count(training.seed)),
        (words["gpu_hours"], formats.hours(training.gpu_hours)),
        (words["package"], record.facts.package_version),
        (words["commit"], record.facts.commit or formats.NOTHING),
    ]
    versions = sorted(training.versions.items())
    return [*rows, *((key, value) for key, value in versions if value and key != "package")]


def attempt_rows(record: Record) -> list[dict[str, str]]:
    """Returns the attempts; each covers the updates after its `first_update`."""
    return [
        {
            "number": str(attempt.attempt),
            "world": formats.count(attempt.world_size),
            "micro_batch": formats.count(attempt.micro_batch),
            "devices": _devices(attempt),
            "covered": f"{attempt.first_update + 1:,} \u2013 {attempt.last_update:,}",
        }
        for attempt in record.attempts
    ]


def digest_rows(record: Record) -> list[tuple[str, str]]:
    """Returns all digests, those of package files with their names."""
    digests = record.facts.digests.model_dump()
    package = digests.pop("package")
    return [*sorted(digests.items()), *((f"package/{name}", value) for name, value in sorted(package.items()))]


def audit_facts(record: Record, waivers: list[Waiver], words: dict[str, str]) -> list[str]:
    """Returns one line each: warnings, waivers, what the record replaces."""
    audit = record.facts.audit
    text = words["warnings"].format(number=audit.num_warnings, ids=", ".join(audit.warning_ids))
    lines = [text if audit.num_warnings else words["no_warnings"]]
    for waiver in waivers:
        if waiver.run_digest == record.facts.digests.run:
            lines.append(words["waived"].format_map(waiver.model_dump()))
    if record.facts.supersedes is not None:
        lines.append(words["supersedes"].format(reason=record.facts.supersedes.reason))
    return lines


def credit_rows(record: Record, words: dict[str, str]) -> list[tuple[str, str]]:
    """Returns authors, licence and citation where stated."""
    facts = record.facts
    rows = [
        (words["authors"], ", ".join(facts.authors)),
        (words["licence"], facts.licence or ""),
        (words["citation"], facts.citation or ""),
    ]
    return [(name, value) for name, value in rows if value]
