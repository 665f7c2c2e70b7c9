"""What the report says of a run at a glance: key figures, and the comparison of several runs."""

from nexttransformer.reporting import formats, noise
from nexttransformer.reporting.evaluations import Evaluation
from nexttransformer.reporting.figures import NOISE_KNOWN
from nexttransformer.reporting.run_view import RunView
from nexttransformer.reporting.series import half_life, median, smooth
from nexttransformer.reporting.tolerant import dig

Row = tuple[str, str]


def group_names(run: RunView) -> list[str]:
    """Names of the optimizer groups in the order of `learning_rates`."""
    groups = dig(run.facts, "optimizer_groups", list) or []
    return [dig(group, "name", str) or f"group {index}" for index, group in enumerate(groups)]


def last_loss(run: RunView) -> float | None:
    """Smoothed training loss of the last update, nats per token."""
    losses = [line.loss_nats for line in run.timeline.effective]
    return smooth(losses, half_life(len(losses)))[-1] if losses else None


def core_text(evaluation: Evaluation | None, words: dict[str, str]) -> Row:
    """Returns CORE x 100 and its remark: v2, or that it is a mean over an excerpt."""
    if evaluation is None or not evaluation.has_core:
        return formats.NOTHING, ""
    if evaluation.core_v1 is not None:
        return formats.points(evaluation.core_v1), f"core_v2 {formats.points(evaluation.core_v2)}"
    return formats.points(evaluation.core_limited), words["core_limited"]


def one_line(run: RunView) -> str:
    """Returns a run's state, score and cost in one line for a terminal."""
    done, curve, memory = run.timeline.last_update, run.bpb_curve, run.peak_memory_bytes
    parts = [f"{run.status}, update {done:,} of {run.last_update or '?'}"]
    if run.timeline.effective:
        parts += [f"loss {last_loss(run):.4f}", f"{formats.count(run.tokens_per_second)} tokens/s"]
        parts += [formats.data_bytes(memory)] if memory is not None else []
        parts += [f"first update {formats.seconds(run.first_update_seconds)}"]
    parts += [f"BPB {curve[-1][1]:.4f}"] if curve else []
    return ", ".join(parts)


def key_figures(run: RunView, words: dict[str, str]) -> list[tuple[str, str, str]]:
    """Returns the cards on top of a run: label, value, remark."""
    lines = run.timeline.effective
    curve = run.bpb_curve
    curve_text = f"val_curve {formats.decimals(curve[-1][1], 4)}" if curve else ""
    final = run.bpb_final
    core_value, core_note = core_text(run.core, words)
    last = run.last_update
    tokens = lines[-1].tokens_seen if lines else None
    remaining = ""
    if run.status == "running" and last and lines:
        speed = median([line.seconds for line in lines[-50:]]) or 0.0
        remaining = ", " + words["left"].format(time=formats.seconds((last - lines[-1].update) * speed))
    unit = words["gpu_hours"] if run.has_gpu else words["process_hours"]
    mfu = run.mfu_fraction
    memory = run.peak_memory_bytes
    return [
        (
            words["bpb_final"] if final is not None else words["bpb_curve"],
            formats.decimals(final if final is not None else (curve[-1][1] if curve else None), 4),
            curve_text if final is not None else (words["at_update"].format(update=curve[-1][0]) if curve else ""),
        ),
        ("CORE", core_value, core_note),
        (words["loss"], formats.decimals(last_loss(run), 4), words["loss_note"]),
        (
            words["updates"],
            formats.count(run.timeline.last_update),
            words["updates_note"].format(last=formats.count(last), tokens=formats.short(tokens)) + remaining,
        ),
        (
            words["speed"],
            formats.count(run.tokens_per_second),
            f"MFU {formats.percent(mfu)}" if mfu is not None else words["tokens_per_second"],
        ),
        (
            unit,
            formats.hours(run.device_hours),
            words["peak_memory"].format(bytes=formats.data_bytes(memory)) if memory else words["training_only"],
        ),
        (
            words["parameters"],
            formats.short(dig(run.facts, "model.num_parameters", int)),
            words["flops"].format(flops=formats.short(dig(run.facts, "model.training_flops_per_token", int))),
        ),
    ]


def comparison(runs: list[RunView], words: dict[str, str]) -> list[tuple[str, list[str]]]:
    """Returns the rows of the table that compares several runs; the first is the reference of differences."""
    first = runs[0].bpb_final
    known = {run.protocol.id if run.protocol else None for run in runs}

    def difference(run: RunView) -> str:
        if run is runs[0]:
            return words["reference"]
        if len(known) > 1 or first is None or run.bpb_final is None:
            return formats.NOTHING
        text = formats.signed(run.bpb_final - first, 4)
        is_tie = known <= set(NOISE_KNOWN) and noise.is_bpb_tie(first, run.bpb_final)
        return f"{text} ({words['tie']})" if is_tie else text

    def core(run: RunView) -> str:
        value, note = core_text(run.core, words)
        return f"{value} ({note})" if note and run.core and run.core.core_v1 is None else value

    def number(path: str) -> list[str]:
        return [formats.count(dig(run.facts, path, int)) for run in runs]

    return [
        (words["method"], [dig(run.facts, "method", str) or formats.NOTHING for run in runs]),
        (words["protocol"], [dig(run.facts, "protocol.id", str) or formats.NOTHING for run in runs]),
        (words["kind"], [words.get(f"mode_{dig(run.facts, 'mode', str)}", formats.NOTHING) for run in runs]),
        (words["status"], [words[f"status_{run.status}"] for run in runs]),
        (words["bpb_final"], [formats.decimals(run.bpb_final, 4) for run in runs]),
        (words["difference"], [difference(run) for run in runs]),
        (words["bpb_curve"], [formats.decimals(run.bpb_curve[-1][1] if run.bpb_curve else None, 4) for run in runs]),
        ("CORE", [core(run) for run in runs]),
        (words["loss"], [formats.decimals(last_loss(run), 4) for run in runs]),
        (
            words["updates"],
            [f"{formats.count(run.timeline.last_update)} / {formats.count(run.last_update)}" for run in runs],
        ),
        (words["parameters"], number("model.num_parameters")),
        (words["flops_row"], number("model.training_flops_per_token")),
        (words["speed_row"], [formats.count(run.tokens_per_second) for run in runs]),
        (words["hours_row"], [formats.hours(run.device_hours) for run in runs]),
        (words["memory_row"], [formats.data_bytes(run.peak_memory_bytes) for run in runs]),
        (words["first_update_row"], [formats.seconds(run.first_update_seconds) for run in runs]),
        (words["seed"], number("seed")),
    ]
