"""The training loop, top to bottom: from the update an attempt starts at to the last one, or to a stop.

One trainer serves every method and protocol. A method supplies model code and a configuration; data,
loss reduction, optimizer, schedules, saves and evaluations are fixed here.
"""

import gc
import hashlib
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from nexttransformer.data.order import from_hex, initial_chain, next_chain, to_hex
from nexttransformer.errors import RunFailure, join_problems
from nexttransformer.training.checkpoint_schema import CheckpointDigests, TrainerState
from nexttransformer.training.collectives import on_rank0
from nexttransformer.training.compile_cache import mark_warm
from nexttransformer.training.compiling import choose_settings, graph_breaks
from nexttransformer.training.distributed import set_update_timeout
from nexttransformer.training.events import EventKey
from nexttransformer.training.feed import Batch, RowFeed
from nexttransformer.training.gradients import accumulate_gradients, wrap_forward
from nexttransformer.training.guards import (
    RecompileCounter,
    SpikeCounter,
    check_all_have_gradients,
    check_no_gradient_is_zero,
    nonfinite_gradients,
)
from nexttransformer.training.metrics import MetricsLine
from nexttransformer.training.preset_evaluations import EvaluatedWeights
from nexttransformer.training.saving import Saver, SaveReason, save_updates
from nexttransformer.training.session import Session
from nexttransformer.training.stop import StopRequests, StopSource
from nexttransformer.training.update_totals import LocalTotals, UpdateTotals, gradient_norm, reduce_totals
from nexttransformer.training.watchdog import REDUCING, WAITING, Watchdog
from nexttransformer.training.weights_digest import weights_digest

# Updates of an attempt that may compile; after them limits are short and compilation is counted.
NUM_WARMUP_UPDATES = 2
# Initial zeros let gradients through one after the other: two updates for all registered methods.
NUM_UPDATES_UNTIL_ALL_LEARN = 4
Outcome = Literal["finished", "stopped"]


@dataclass
class Progress:
    """The numbers that a checkpoint keeps besides tensors; pure functions of the updates so far."""

    update: int
    chain: int
    spikes: SpikeCounter


def train(session: Session, state: Progress, stops: StopRequests, watchdog: Watchdog) -> Outcome:
    """Makes the updates that are left. On return everything up to `state.update` is saved and evaluated."""
    options, world, plan, journal = session.options, session.world, session.plan, session.journal
    model, optimizer, protocol, hook = session.model, session.optimizer, session.options.protocol, session.hook
    assert model is not None and optimizer is not None
    parameters = dict(model.named_parameters())
    group_of = {name: group.settings.name for group in session.groups for name in group.names}
    evaluations, progress = session.evaluations, session.progress
    first, last = state.update, options.last_update
    saves = set(save_updates(protocol, first=first, last=last, evaluated=evaluations.updates))
    saver = Saver(
        world,
        session.record,
        journal,
        session.lock,
        options.retention,
        parameters=parameters,
        optimizer=optimizer,
        group_of=group_of,
        hook=lambda step: hook(f"save:{step}", state.update, session.folder),
    )

    # Evaluations that an earlier attempt did not complete come first.
    model.set_step(first)
    _evaluate_at_start(session, state)
    if first == last:
        return "finished"

    settings = choose_settings(world, is_wanted=options.is_compiled)
    forward = wrap_forward(model, world, settings, loss_scale=world.world_size / protocol.tokens_per_update)
    recompiles = RecompileCounter()
    feed = RowFeed(
        session.data.rows,
        plan,
        context_tokens=protocol.context_tokens,
        first_update=first,
        last_update=last,
        device=world.device,
    )
    optimizer.zero_grad()
    began = time.monotonic()
    try:
        with watchdog.watching():
            for update in range(first, last):
                watchdog.at("reading rows")
                batch = feed.take(update)
                watchdog.at("computing gradients")
                model.set_step(update)
                _seed_everything(options.seed, update)
                nats = _gradients(session, forward, batch, watchdog)
                if update == first:
                    check_all_have_gradients(parameters)
                hook("gradients", update, parameters)
                if update == first + NUM_UPDATES_UNTIL_ALL_LEARN:
                    check_no_gradient_is_zero(parameters)
                norm = gradient_norm([tensor.grad for tensor in parameters.values() if tensor.grad is not None])
                source = stops.poll()
                local = LocalTotals(
                    tokens=batch.num_rows * protocol.context_tokens,
                    rows=batch.num_rows,
                    rows_hash=batch.rows_hash,
                    stop=source is not None or journal.write_problem is not None,
                    save=world.is_main and time.monotonic() - saver.last_time >= 60 * options.save_minutes,
                    failure=batch.problem is not None,
                )
                watchdog.at(WAITING)
                totals = reduce_totals(world, local, nats, norm)
                _check_totals(session, update, totals, batch, nats, parameters)

                watchdog.at("stepping")
                optimizer.step(update)
                optimizer.zero_grad()
                state.update = completed = update + 1
                state.chain = next_chain(state.chain, completed, totals.rows_hash)
                seconds, began = time.monotonic() - began, time.monotonic()
                line = _metrics_line(session, state, totals, seconds)
                journal.metrics(line)
                if spike := state.spikes.add(line.loss_nats):
                    journal.event(EventKey.SPIKE, "loss", spike, update=completed)
                watchdog.completed(completed, seconds)
                progress.update(line)
                _after_warmup(session, completed - first, recompiles, completed)
                hook("applied", completed, parameters)

                reason = _save_reason(completed, last, saves, totals)
                due = evaluations.due(completed)
                if reason is not None:
                    with watchdog.resting():
                        progress.pause()
                        gc.collect()
                        must_succeed = reason in ("stop", "final") or bool(due)
                        saved = saver.save(_trainer_state(session, state), reason, must_succeed=must_succeed)
                        if saver.seconds is not None:
                            progress.tell_stop_cost(saver.seconds, minutes_since_save=0.0)
                        if due and saved is not None and not totals.num_stops:
                            hook("evaluating", completed, session.folder)
                            weights = EvaluatedWeights.of_marker(saved.marker)
                            progress.evaluated(evaluations.run(model, journal, weights, due))
                            recompiles.settle()
                    began = time.monotonic()
                elif progress.is_stop_cost_due and saver.seconds is not None:
                    progress.tell_stop_cost(saver.seconds, (time.monotonic() - saver.last_time) / 60)
                if totals.num_stops:
                    _note_stop(session, source, completed)
                    return "stopped"
    finally:
        feed.close()
    return "finished"


def progress_at_start(session: Session) -> Progress:
    """Returns where the attempt starts: update 0, or what the chosen checkpoint says."""
    saved = session.choice.state
    if saved is None:
        return Progress(0, initial_chain(), SpikeCounter())
    return Progress(saved.update, from_hex(saved.data_chain), SpikeCounter(saved.spike_losses, saved.num_spikes))


def _evaluate_at_start(session: Session, state: Progress) -> None:
    """Does what is due at the update an attempt starts from; at update 0 there is no checkpoint to name."""
    evaluations, model, journal = session.evaluations, session.model, session.journal
    assert model is not None
    marker = session.choice.marker
    if marker is not None:
        weights = EvaluatedWeights.of_marker(marker)
        kinds = evaluations.missing(journal, weights)
    else:
        kinds = evaluations.due(state.update)
        digest = (
            on_rank0(lambda: weights_digest(dict(model.named_parameters())), session.world.control) if kinds else ""
        )
        weights = EvaluatedWeights(state.update, digest, None)
    if kinds:
        session.progress.evaluated(evaluations.run(model, journal, weights, kinds))


def _seed_everything(seed: int, update: int) -> None:
    """Makes all randomness of an update a function of (seed, update), so that there is no state to save."""
    text = f"{seed}:update:{update}".encode()
    torch.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1)


def _gradients(session: Session, forward: nn.Module, batch: Batch, watchdog: Watchdog) -> Tensor:
    """Accumulates this rank's gradients, synchronized at the end; returns its sum of nats (float64 scalar)."""
    return accumulate_gradients(
        forward,
        batch,
        session.plan,
        on_nats=lambda nats: session.hook("nats", batch.update, nats),
        on_last=lambda: watchdog.at(REDUCING),
    )


def _check_totals(
    session: Session,
    update: int,
    totals: UpdateTotals,
    batch: Batch,
    nats: Tensor,
    parameters: dict[str, nn.Parameter],
) -> None:
    """Refuses an update that must not be applied; every rank comes to the same conclusion.

    Raises:
        RunFailure: unreadable rows, wrong counts, or a non-finite loss or gradient on any rank.
    """
    control, protocol = session.world.control, session.options.protocol
    if totals.num_failures:
        found = control.broadcast_object(control.gather_objects(batch.problem))
        raise RunFailure(join_problems([problem for problem in found if problem is not None]))
    if totals.rows != protocol.global_batch_rows or totals.tokens != protocol.tokens_per_update:
        raise RunFailure(
            f"Update {update + 1} has {totals.rows} rows and {totals.tokens:,} tokens, expected "
            f"{protocol.global_batch_rows} and {protocol.tokens_per_update:,}. Not applied."
        )
    if totals.is_finite:
        return
    bad_ranks = control.broadcast_object(control.gather_objects(not bool(torch.isfinite(nats))))
    ranks = [rank for rank, is_bad in enumerate(bad_ranks) if is_bad]
    names = nonfinite_gradients(parameters)
    all_names = control.broadcast_object(control.gather_objects(names))
    names = list(dict.fromkeys(name for each in all_names for name in each))[:5]
    kind = "loss" if ranks else "gradient"
    meta = {"ranks": ranks, "update": update + 1, "parameters": names}
    session.journal.event(EventKey.NONFINITE, kind, meta, update=update)
    where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    shown = f" First parameters: {', '.join(names)}." if names else ""
    raise RunFailure(f"Non-finite {kind}{where} in update {update + 1}; no rank applied it.{shown}")


def _metrics_line(session: Session, state: Progress, totals: UpdateTotals, seconds: float) -> MetricsLine:
    optimizer, device = session.optimizer, session.world.device
    assert optimizer is not None
    rates = optimizer.applied_rates(state.update - 1)
    tokens_per_second = totals.tokens / seconds
    return MetricsLine(
        attempt=session.journal.attempt,
        update=state.update,
        loss_nats=totals.nats / totals.tokens,
        gradient_norm=totals.gradient_norm,
        learning_rates=list(rates.learning_rates),
        muon_momentum=rates.muon_momentum,
        muon_weight_decay=rates.muon_weight_decay,
        rows=totals.rows,
        tokens=totals.tokens,
        tokens_seen=state.update * session.options.protocol.tokens_per_update,
        rows_hash=to_hex(totals.rows_hash),
        data_chain=to_hex(state.chain),
        seconds=seconds,
        tokens_per_second=tokens_per_second,
        mfu_fraction=session.throughput.mfu(tokens_per_second),
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def _trainer_state(session: Session, state: Progress) -> TrainerState:
    record, protocol, optimizer = session.record, session.options.protocol, session.optimizer
    assert optimizer is not None
    return TrainerState(
        run_id=record.run_id,
        mode=record.mode,
        method=record.method,
        update=state.update,
        num_updates=record.num_updates,
        last_update=record.last_update,
        seed=record.seed,
        tokens_seen=state.update * protocol.tokens_per_update,
        next_row=state.update * protocol.global_batch_rows,
        data_chain=to_hex(state.chain),
        optimizer_updates=optimizer.num_updates_done,
        spike_losses=state.spikes.losses,
        num_spikes=state.spikes.num_spikes,
        attempt=session.journal.attempt,
        world_size=session.world.world_size,
        micro_batch=session.plan.micro_batch,
        digests=CheckpointDigests.of_run(record),
    )


def _after_warmup(session: Session, num_done: int, recompiles: RecompileCounter, completed: int) -> None:
    """What changes once the first updates are done: no garbage collection, short limits, counted compilation."""
    if num_done == 1:
        gc.collect()
        gc.freeze()
        gc.disable()
    if num_done == NUM_WARMUP_UPDATES:
        session.world.control.barrier()
        set_update_timeout(session.world, session.world.limits.updates)
        recompiles.settle()
        mark_warm()
        for reason in graph_breaks():
            session.progress.say(f"compilation cut the graph: {reason}")
    if num_new := recompiles.poll():
        session.journal.event(EventKey.RECOMPILE, "graphs", {"number": num_new}, update=completed)
        session.progress.say(f"warning: {num_new} recompilations in update {completed}; shapes should be fixed.")


def _save_reason(completed: int, last: int, saves: set[int], totals: UpdateTotals) -> SaveReason | None:
    if completed == last:
        return "final"
    if totals.num_stops:
        return "stop"
    if completed in saves:
        return "scheduled"
    return "time" if totals.num_saves else None


def _note_stop(session: Session, source: StopSource | None, completed: int) -> None:
    """Writes who asked for the stop; a line that could not be written is a failure of the run.

    Raises:
        RunFailure: on all ranks, if rank 0 could not write its logs.
    """
    control = session.world.control
    found = control.broadcast_object(control.gather_objects(source))
    for rank, each in enumerate(found):
        if each is not None:
            session.journal.event(EventKey.STOP_REQUESTED, each, {"rank": rank}, update=completed)
    problem = control.broadcast_object(session.journal.write_problem)
    if problem is not None:
        raise RunFailure(f"{problem} Metrics are evidence, so the run stopped; update {completed} is saved.")
