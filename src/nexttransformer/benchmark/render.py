"""The tables of a benchmark, for people."""

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.table import Table

from nexttransformer.benchmark.kernel_classes import CLASSES

_NONE = "-"
_CAPTION = (
    "rows: micro-batch. ms, tokens/s: forward and backward. updates: tokens/s of whole updates. MFU: causal-exact, "
    "nom.: nominal, percent. roof: percent of what products and attention alone would allow. start: seconds to the "
    "first pass."
)


def _number(value: float | None, unit: str = "", digits: int = 0) -> str:
    return _NONE if value is None else f"{value:,.{digits}f}{unit}"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.1f}"


def _milliseconds(value: float | None) -> str:
    return _NONE if value is None else f"{1000 * value:,.1f}"


def _gigabytes(value: float | None) -> str:
    return _NONE if value is None else f"{value / 2**30:.1f}"


def speed_table(record: dict[str, Any]) -> Table:
    """Returns one line for each configuration and micro-batch."""
    hardware = record["hardware"]
    title = f"{record['settings']['protocol']['id']}, {hardware['num_devices']} x {hardware['device']}"
    table = Table(
        title=title, caption=_CAPTION, box=SIMPLE, pad_edge=False, title_justify="left", collapse_padding=True
    )
    table.add_column("method", overflow="fold", min_width=12)
    for name in ("rows", "ms", "tokens/s", "updates", "GiB", "MFU", "nom.", "roof", "start"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in record["configurations"]:
        for run in entry["runs"]:
            step, update = run.get("step", {}), run.get("update", {})
            rated = step if "tokens_per_second" in step else update
            peaks = [part["peak_memory_bytes"] for part in (step, update) if part.get("peak_memory_bytes")]
            table.add_row(
                entry["method"],
                str(run["micro_batch"]),
                _milliseconds(step.get("seconds", {}).get("median_seconds")),
                _number(step.get("tokens_per_second")),
                _number(update.get("tokens_per_second")),
                _gigabytes(max(peaks) if peaks else None),
                _percent(rated.get("mfu_causal_exact")),
                _percent(rated.get("mfu_nominal")),
                _percent(run.get("roofline_fraction")),
                _number(step.get("first_step_seconds"), digits=1),
            )
    return table


def breakdown_table(record: dict[str, Any]) -> Table | None:
    """Returns the shares of an update by kind of work, a column for each configuration at its best micro-batch."""
    columns = [
        (f"{entry['method']} {run['micro_batch']}", run["breakdown"]["update_shares"])
        for entry in record["configurations"]
        for run in entry["runs"]
        if "update_shares" in run.get("breakdown", {}) and entry["best_micro_batch"] in (None, run["micro_batch"])
    ]
    if not columns:
        return None
    table = Table(title="percent of a whole update", box=SIMPLE, pad_edge=False, title_justify="left")
    table.add_column("work", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right")
    for kind in CLASSES:
        if any(kind in shares for _, shares in columns):
            table.add_row(kind.replace("_", " "), *[_percent(shares.get(kind, 0.0)) for _, shares in columns])
    return table


def job_lines(record: dict[str, Any]) -> Iterator[str]:
    """Yields one line for each part measured once for a configuration."""
    machine = record["machine"]
    if "product_flops_per_second" in machine:
        side = machine["product_side"]
        yield (
            f"machine: {side} x {side} {machine['dtype']} product {machine['product_flops_per_second'] / 1e12:.4g} "
            f"TFLOP/s, copy {machine['copy_bytes_per_second'] / 1e12:.3g} TB/s"
        )
    for entry in record["configurations"]:
        for part, values in entry["parts"].items():
            if "error" not in values:
                yield f"{entry['method']}: {part}: {_FACTS[part](values)}"
        projection = entry["projection"]
        if projection is not None:
            yield (
                f"{entry['method']}: a whole run on {projection['num_gpus']} such devices, calculated: "
                f"{projection['total_hours']:.3g} h ({projection['gpu_hours']:.4g} device hours) at micro-batch "
                f"{projection['micro_batch']}"
            )


def _optimizer(values: dict[str, Any]) -> str:
    return f"{_milliseconds(values['seconds']['median_seconds'])} ms a step"


def _communication(values: dict[str, Any]) -> str:
    sent = f"{values['sent_bytes_per_rank_and_update'] / 1e9:.3g} GB sent per rank and update"
    rate = values["algorithm_bytes_per_second"]
    return sent if rate is None else f"{sent}, all-reduce {rate / 1e9:.3g} GB/s"


def _data(values: dict[str, Any]) -> str:
    return f"{values['tokens_per_second']:,.0f} tokens/s of {values['rows']} rows"


def _evaluate(values: dict[str, Any]) -> str:
    curve, core = values["validation"], values["core"]
    return (
        f"validation {curve['tokens_per_second']:,.0f} tokens/s (val_curve {curve['val_curve_seconds']:.3g} s), CORE "
        f"{core['tokens_per_second']:,.0f} tokens/s ({core['bundle']}: {core['bundle_seconds']:.3g} s calculated)"
    )


def _checkpoint(values: dict[str, Any]) -> str:
    return (
        f"{values['num_bytes'] / 1e9:.3g} GB, saved in {values['save_seconds']:.3g} s "
        f"({values['save_bytes_per_second'] / 1e9:.3g} GB/s), checked and loaded in "
        f"{values['verify_seconds'] + values['load_seconds']:.3g} s ({values['load_bytes_per_second'] / 1e9:.3g} GB/s)"
    )


_FACTS = {
    "optimizer": _optimizer,
    "communication": _communication,
    "data": _data,
    "evaluate": _evaluate,
    "checkpoint": _checkpoint,
}


def render(record: dict[str, Any]) -> RenderableType:
    """Returns everything that is printed at the end."""
    parts: list[RenderableType] = [speed_table(record)]
    breakdown = breakdown_table(record)
    if breakdown is not None:
        parts.append(breakdown)
    parts += list(job_lines(record))
    parts += [f"not measured: {problem}" for problem in record["problems"]]
    return Group(*parts)


def render_text(record: dict[str, Any], *, width: int = 120) -> str:
    """Returns the same as plain text."""
    console = Console(width=width, color_system=None, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(render(record))
    return captured.get()
