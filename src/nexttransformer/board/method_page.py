"""What a method's page shows of its record: cards, chart data, tasks, training, audit, credits."""

from typing import Any

from nexttransformer.board.rank import REFERENCE_METHOD, Ranked
from nexttransformer.board.records import FORMAL, Record
from nexttransformer.board.tables import rank_text
from nexttransformer.reporting import formats
from nexttransformer.reporting.tolerant import dig

_START_FRACTION, _LONG_UPDATES = 0.03, 500


def method_cards(record: Record, row: Ranked | None, words: dict[str, str]) -> list[tuple[str, str, str]]:
    """Returns the cards on top of a method's page: label, value, remark."""
    rank = formats.NOTHING
    remark = record.track
    if row is not None:
        rank = rank_text(row)
        remark = words["tie_with"].format(methods=", ".join(row.ties)) if row.ties else ""
    to_reference = ""
    if row is not None and row.difference is not None and record.method != REFERENCE_METHOD:
        to_reference = words["to_reference"].format(difference=formats.signed(row.difference, 4))
        if row.is_tie_with_reference and record.division == FORMAL:
            to_reference += f" ({words['tie']})"
    ratio = dig(record.value, "model.flops_ratio", float) or dig(record.value, "model.ratio_to_reference", float)
    if record.core_v1 is not None:
        core, core_note = formats.points(record.core_v1), f"core_v2 {formats.points(record.core_v2)}"
    else:
        core = formats.points(record.core_limited)
        core_note = "" if record.core_limited is None else words["core_limited_note"]
    return [
        (words["rank"], rank, remark),
        ("BPB", formats.decimals(record.bpb, 4), to_reference),
        ("CORE", core, core_note),
        (words["parameters"], formats.millions(record.num_parameters), ""),
        (
            words["flops"],
            formats.short(record.flops_per_token, 4),
            "" if ratio is None else f"{formats.signed(100 * (ratio - 1), 2)} %",
        ),
        (words["speed"], formats.count(record.tokens_per_second), _gpu_text(record)),
    ]


def _gpu_text(record: Record) -> str:
    texts = [_devices(item) for item in record.attempts]
    return ", ".join(dict.fromkeys(text for text in texts if text != formats.NOTHING))


def _devices(attempt: dict[str, Any]) -> str:
    gpus = dig(attempt, "gpus", dict)
    if gpus:
        return ", ".join(f"{number} x {name}" for name, number in sorted(gpus.items()))
    name = dig(attempt, "gpu_name", str) or dig(attempt, "gpu", str)
    number = dig(attempt, "num_gpus", int) or dig(attempt, "gpu_count", int)
    return formats.NOTHING if name is None else f"{number} x {name}" if number else name


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
            "fraction": task.accuracy,
            "accuracy": formats.percent(task.accuracy),
            "centered_v1": formats.points(task.centered_v1),
            "centered_v2": formats.points(task.centered_v2),
        }
        for task in record.tasks
    ]


def training_facts(record: Record, words: dict[str, str]) -> list[tuple[str, str]]:
    """Returns what is known of model and training."""

    def first(kind: type, *paths: str) -> Any:
        return next((value for path in paths if (value := dig(record.value, path, kind)) is not None), None)

    rows = [
        (words["parameters"], formats.count(record.num_parameters)),
        (words["lookup"], formats.count(first(int, "model.num_lookup"))),
        (words["matmul"], formats.count(first(int, "model.num_matmul"))),
        (words["flops"], formats.count(record.flops_per_token)),
        (words["decode_state"], formats.data_bytes(first(int, "model.decode_state_bytes"))),
        (words["updates"], formats.count(first(int, "training.updates", "training.num_updates"))),
        (words["tokens"], formats.count(first(int, "training.tokens", "training.num_tokens"))),
        (words["seed"], formats.count(first(int, "training.seed"))),
        (words["gpu_hours"], formats.hours(first(float, "training.gpu_hours"))),
        (words["package"], first(str, "package_version") or formats.NOTHING),
    ]
    versions = dig(record.value, "training.versions", dict) or {}
    rows += [(key, str(value)) for key, value in sorted(versions.items()) if value and key != "package"]
    return [(name, value) for name, value in rows if value != formats.NOTHING]


def attempt_rows(record: Record) -> list[dict[str, str]]:
    """Returns the attempts."""
    rows = []
    for number, item in enumerate(record.attempts):
        first, last = dig(item, "first_update", int), dig(item, "last_update", int)
        covered = formats.NOTHING if first is None or last is None else f"{first:,} \u2013 {last:,}"
        rows.append(
            {
                "number": str(number),
                "world": formats.count(dig(item, "world_size", int)),
                "micro_batch": formats.count(dig(item, "micro_batch", int)),
                "devices": _devices(item),
                "covered": covered,
            }
        )
    return rows


def digest_rows(record: Record) -> list[tuple[str, str]]:
    """Returns all digests, nested ones with dotted names."""
    rows: list[tuple[str, str]] = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                walk(f"{prefix}.{key}" if prefix else key, value[key])
        elif isinstance(value, str):
            rows.append((prefix, value))

    walk("", record.value.get("digests"))
    return rows


def audit_facts(record: Record, waivers: list[dict[str, Any]], words: dict[str, str]) -> list[str]:
    """Returns one line each: warnings, waivers, what the record replaces."""
    ids = [item for item in dig(record.value, "audit.warning_ids", list) or [] if isinstance(item, str)]
    number = dig(record.value, "audit.num_warnings", int) or dig(record.value, "audit.warnings", int) or len(ids)
    lines = [words["warnings"].format(number=number, ids=", ".join(ids)) if number else words["no_warnings"]]
    run_digest = dig(record.value, "digests.run", str)
    for waiver in waivers:
        if run_digest is not None and dig(waiver, "run_digest", str) == run_digest:
            texts = {key: dig(waiver, key, str) or "?" for key in ("check", "reason", "reviewer")}
            lines.append(words["waived"].format(**texts))
    reason = dig(record.value, "supersedes.reason", str)
    if reason is not None:
        lines.append(words["supersedes"].format(reason=reason))
    return lines


def credit_rows(record: Record, words: dict[str, str]) -> list[tuple[str, str]]:
    """Returns authors, licence and citation where stated."""
    authors = dig(record.value, "authors", list) or []
    names = [item if isinstance(item, str) else dig(item, "name", str) for item in authors]
    rows = [
        (words["authors"], ", ".join(name for name in names if name)),
        (words["licence"], dig(record.value, "licence", str) or ""),
        (words["citation"], dig(record.value, "citation", str) or ""),
    ]
    return [(name, value) for name, value in rows if value]


def link_rows(record: Record) -> list[str]:
    """Returns the stated web links; anything but http and https is left out."""
    links = record.value.get("links")
    values = list(links.values()) if isinstance(links, dict) else links if isinstance(links, list) else []
    texts = [item if isinstance(item, str) else dig(item, "url", str) for item in values]
    return [text for text in texts if text and text.startswith(("https://", "http://"))]
