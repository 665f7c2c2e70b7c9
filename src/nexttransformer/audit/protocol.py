"""C1 to C7: lengths, shares, optimizer groups, schedules, precision, seed, no skipped update."""

from collections.abc import Iterator

import numpy as np

from nexttransformer.audit.cell import guarded
from nexttransformer.audit.check import Finding, check, differs, error, unjudged
from nexttransformer.audit.provenance import LENGTH_CONSTANTS
from nexttransformer.audit.run_view import RunView
from nexttransformer.optim.schedule import scheduled_rates
from nexttransformer.training.events import EventKey
from nexttransformer.training.run_record import group_records
from nexttransformer.training.shares import rank_rows

# The cosine of another C library may differ in the last bit.
RATE_TOLERANCE = 1e-12
# What evaluations compute in, by the policy: bfloat16 on a GPU, float32 on a CPU.
_PRECISIONS = {"bf16_fp32master_1": ("bfloat16", "float32")}


@check("C1")
def check_length(view: RunView) -> Iterator[Finding]:
    """Updates, rows, context, and their product."""
    protocol = view.reference.protocol

    def recorded() -> Iterator[Finding]:
        run = view.run.get()
        yield from differs(
            "The number of updates", "run.json num_updates", expected=protocol.num_updates, got=run.num_updates
        )
        context = run.config.get("context_tokens")
        yield from differs(
            "The context", "run.json config.context_tokens", expected=protocol.context_tokens, got=context
        )
        for key in LENGTH_CONSTANTS:
            where, got = f"run.json protocol.constants.{key}", run.protocol.constants.get(key)
            yield from differs("A constant of the protocol", where, expected=getattr(protocol, key), got=got)

    def made() -> Iterator[Finding]:
        checkpoint = view.newest
        if checkpoint.protocol is not None and checkpoint.protocol.value is not None:
            for key in LENGTH_CONSTANTS:
                where, got = (
                    f"{checkpoint.protocol.where} constants.{key}",
                    checkpoint.protocol.value.constants.get(key),
                )
                yield from differs("A constant of the protocol", where, expected=getattr(protocol, key), got=got)
        marker = checkpoint.marker.get()
        yield from differs(
            "The last saved update",
            f"{checkpoint.marker.where} update",
            expected=protocol.num_updates,
            got=marker.update,
        )
        for update, each in view.checkpoints.items():
            if each.state.value is not None:
                where = f"{each.state.where}"
                for key in ("num_updates", "last_update"):
                    yield from differs(
                        "The number of updates",
                        f"{where} {key}",
                        expected=protocol.num_updates,
                        got=getattr(each.state.value, key),
                    )
                yield from differs(
                    "The update of a checkpoint", f"{where} update", expected=update, got=each.state.value.update
                )

    yield from guarded({"recorded": recorded, "made": made})


@check("C2")
def check_shares(view: RunView) -> Iterator[Finding]:
    """Rows of the ranks and of every update."""
    protocol = view.reference.protocol
    batch = protocol.global_batch_rows

    def attempts() -> Iterator[Finding]:
        for logged, meta in view.attempt_starts:
            where = f"{logged.where} meta"
            if not 1 <= meta.world_size <= batch:
                yield error(
                    "The number of ranks is impossible.",
                    f"{where}.world_size",
                    expected=f"1 to {batch}",
                    got=meta.world_size,
                )
                continue
            shares = rank_rows(meta.world_size, batch)
            yield from differs("The shares of the ranks", f"{where}.rank_rows", expected=shares, got=meta.rank_rows)
            if not 1 <= meta.micro_batch <= batch:
                yield error(
                    "The micro-batch is impossible.",
                    f"{where}.micro_batch",
                    expected=f"1 to {batch}",
                    got=meta.micro_batch,
                )

    def lines() -> Iterator[Finding]:
        metrics = view.metrics.get()
        for key, expected in (("rows", batch), ("tokens", protocol.tokens_per_update)):
            column = getattr(metrics, key)
            for index in np.flatnonzero(column != expected):
                yield error(
                    f"An update does not have all {key}.",
                    metrics.where(index, key),
                    expected=expected,
                    got=int(column[index]),
                )

    yield from guarded({"attempts": attempts, "lines": lines})


@check("C3")
def check_groups(view: RunView) -> Iterator[Finding]:
    """Optimizer groups as the configuration and the protocol give them."""
    groups = view.facts.groups

    def recorded() -> Iterator[Finding]:
        expected = group_records(groups, view.reference.protocol)
        found = view.run.get().optimizer_groups
        names = [group.name for group in expected]
        yield from differs(
            "The optimizer groups", "run.json optimizer_groups", expected=names, got=[group.name for group in found]
        )
        by_name = {group.name: group for group in found}
        for group in expected:
            if group.name in by_name:
                for key, value in group.model_dump().items():
                    where = f"run.json optimizer_groups.{group.name}.{key}"
                    yield from differs(
                        "An optimizer group", where, expected=value, got=getattr(by_name[group.name], key)
                    )

    def saved() -> Iterator[Finding]:
        cell = view.newest.index
        assert cell is not None
        expected = {name: group.settings.name for group in groups for name in group.names}
        found = {name: entry.group for name, entry in cell.get().parameters.items()}
        for name in sorted(expected.keys() | found.keys()):
            where = f"{cell.where} parameters.{name}"
            yield from differs("The group of a parameter", where, expected=expected.get(name), got=found.get(name))

    yield from guarded({"recorded": recorded, "saved": saved})


@check("C4")
def check_schedules(view: RunView) -> Iterator[Finding]:
    """Rates of every effective update."""
    protocol, metrics, groups = view.reference.protocol, view.metrics.get(), view.facts.groups
    timeline = view.timeline
    for index in timeline.lines:
        update = int(metrics.update[index])
        rates = scheduled_rates(update - 1, groups, num_updates=protocol.num_updates, protocol=protocol)
        found = metrics.learning_rates[index]
        muon = (float(metrics.muon_momentum[index]), float(metrics.muon_weight_decay[index]))
        if found == rates.learning_rates and muon == (rates.muon_momentum, rates.muon_weight_decay):
            continue
        if len(found) != len(groups):
            yield error(
                "The number of learning rates differs.",
                metrics.where(index, "learning_rates"),
                expected=len(groups),
                got=len(found),
            )
            continue
        for number, (expected, got) in enumerate(zip(rates.learning_rates, found, strict=True)):
            if not _is_close(expected, got):
                name = groups[number].settings.name
                where = metrics.where(index, f"learning_rates[{number}]")
                yield error(f"The learning rate of group {name} differs.", where, expected=expected, got=got)
        for key, got in zip(("muon_momentum", "muon_weight_decay"), muon, strict=True):
            expected = getattr(rates, key)
            if not _is_close(expected, got):
                yield error(f"{key} differs.", metrics.where(index, key), expected=expected, got=got)
    if not len(timeline.lines):
        yield unjudged("Needs metrics lines, and there are none.", "metrics.jsonl")


def _is_close(expected: float, got: float) -> bool:
    return abs(got - expected) <= RATE_TOLERANCE * abs(expected)


@check("C5")
def check_precision(view: RunView) -> Iterator[Finding]:
    """Precision policy and loss."""
    run, protocol = view.run.get(), view.reference.protocol
    yield from differs(
        "The precision policy",
        "run.json precision_policy",
        expected=protocol.precision_policy,
        got=run.precision_policy,
    )
    yield from differs("The loss", "run.json loss", expected=protocol.loss, got=run.loss)
    on_gpu, on_cpu = _PRECISIONS[protocol.precision_policy]
    devices = {name for _, meta in view.attempt_starts for name in meta.gpus}
    expected = sorted({on_cpu if name == "cpu" else on_gpu for name in devices})
    for name, cell in view.evaluations.items():
        if cell.value is not None and cell.value.precision not in expected:
            yield error(
                "The precision of an evaluation differs.",
                f"{name} precision",
                expected=expected,
                got=cell.value.precision,
            )


@check("C6")
def check_seed(view: RunView) -> Iterator[Finding]:
    """One seed everywhere."""
    expected = view.reference.protocol.seed
    for checkpoint in view.checkpoints.values():
        if checkpoint.state.value is not None:
            yield from differs(
                "The seed", f"{checkpoint.state.where} seed", expected=expected, got=checkpoint.state.value.seed
            )
    yield from differs("The seed", "run.json seed", expected=expected, got=view.run.get().seed)
    for logged, meta in view.attempt_starts:
        yield from differs("The seed", f"{logged.where} meta.seed", expected=expected, got=meta.seed)


@check("C7")
def check_no_skipped_update(view: RunView) -> Iterator[Finding]:
    """Nothing follows a non-finite update inside its attempt; the optimizer made every update."""

    def nonfinite() -> Iterator[Finding]:
        metrics = view.metrics.get()
        for logged in view.events.get().of(EventKey.NONFINITE):
            later = (metrics.attempt == logged.event.attempt) & (metrics.update > logged.event.update)
            for index in np.flatnonzero(later)[:1]:
                yield error(
                    "An update follows a non-finite one without a resume.",
                    metrics.where(index),
                    expected="no update",
                    got=logged.where,
                )

    def counts() -> Iterator[Finding]:
        view.newest.state.get()
        for checkpoint in view.checkpoints.values():
            if checkpoint.state.value is not None:
                where, got = f"{checkpoint.state.where} optimizer_updates", checkpoint.state.value.optimizer_updates
                yield from differs("The optimizer's count of updates", where, expected=checkpoint.update, got=got)

    yield from guarded({"nonfinite": nonfinite, "counts": counts})
