"""Opening an attempt: every check before update 1, in the order of the reliability rules, and what the loop needs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nexttransformer.checking import require_config
from nexttransformer.errors import CheckpointError, ProtocolError, join_problems
from nexttransformer.models import Decoder, build_model
from nexttransformer.models.budget import Budget
from nexttransformer.ops.self_check import check_kernels
from nexttransformer.optim.groups import ParameterGroup, partition_parameters
from nexttransformer.optim.optimizer import Optimizer
from nexttransformer.training import startup
from nexttransformer.training.checkpoint import expected_bytes
from nexttransformer.training.checkpoint_choice import Choice, choose_checkpoint
from nexttransformer.training.checkpoint_load import load_checkpoint
from nexttransformer.training.collectives import all_agree, on_all_ranks, on_rank0
from nexttransformer.training.compile_cache import set_cache_folders
from nexttransformer.training.distributed import World, broadcast_parameters
from nexttransformer.training.events import EventKey
from nexttransformer.training.journal import Journal, complete_log
from nexttransformer.training.kernel_tuning import KernelTuning
from nexttransformer.training.launch_plan import LaunchPlan, plan_launch
from nexttransformer.training.lock import LockLost, RunLock
from nexttransformer.training.metrics_math import Throughput, peak_flops
from nexttransformer.training.options import TrainOptions
from nexttransformer.training.preset_evaluations import PresetEvaluations
from nexttransformer.training.progress import ProgressLine, run_header
from nexttransformer.training.retention import check_space
from nexttransformer.training.run_data import RunData, check_formal_data, data_digests, data_facts, open_data
from nexttransformer.training.run_folder import RunFolder
from nexttransformer.training.run_record import attempt_meta, build_record, check_formal_code, rank_facts
from nexttransformer.training.run_schema import RunRecord
from nexttransformer.training.saving import save_updates
from nexttransformer.training.shares import MicroBatchPlan, plan_micro_batches
from nexttransformer.training.trackers import Trackers
from nexttransformer.training.versions import device_name
from nexttransformer.training.weights_digest import find_difference

# Called at named points of an attempt with (point, completed updates, object at hand); tests inject faults there.
Hook = Callable[[str, int, Any], None]


def no_hook(point: str, update: int, thing: Any) -> None:
    """Does nothing."""


@dataclass
class Session:
    """An opened attempt. `model` and `optimizer` are freed before the final evaluation."""

    options: TrainOptions
    world: World
    folder: RunFolder
    record: RunRecord
    choice: Choice
    journal: Journal
    lock: RunLock | None
    data: RunData
    plan: MicroBatchPlan
    groups: list[ParameterGroup]
    evaluations: PresetEvaluations
    progress: ProgressLine
    throughput: Throughput
    model: Decoder | None
    optimizer: Optimizer | None
    hook: Hook

    def is_folder_ours(self) -> bool:
        """Whether the lock is still this launch's; if not, nothing more may be written."""
        try:
            if self.lock is not None:
                self.lock.check()
        except LockLost:
            return False
        return True

    def close(self) -> None:
        """Closes the logs and gives the folder free; never raises for a lost lock."""
        self.progress.pause()
        self.journal.close()
        if self.lock is not None:
            self.lock.release()


def open_session(options: TrainOptions, world: World, hook: Hook = no_hook) -> Session | str:
    """Checks everything and loads what the launch continues. Collective.

    Returns:
        The session; or one line if the run is finished and nothing is to do.

    Raises:
        NextTransformerError: the same on every rank; nothing was trained, exit code 2.
    """
    control, protocol = world.control, options.protocol
    folder = RunFolder(options.output)
    # 1. The same job and inputs everywhere.
    startup.check_layout(world, options.place, protocol.global_batch_rows)
    startup.check_shared_folder(world, folder.root)
    facts = on_all_ranks(lambda: {**rank_facts(world, options), **data_facts(options)}, control)
    warnings = startup.check_equal(world, facts)
    warnings += set_cache_folders(options.site.cache_root, world)
    # 2. Data present on every node, enough rows, formal conditions.
    data = on_all_ranks(lambda: open_data(options, check_files=world.local_rank == 0), control)
    if options.mode == "formal":
        warnings += on_rank0(lambda: _check_formal(options, data), control)
    with_core = options.mode != "smoke" and "core" in options.evaluations
    digests = data_digests(data, protocol, with_core=with_core)
    candidate, budget = on_rank0(lambda: build_record(options, digests), control)
    # 3. The run folder: what this launch may do with it, first by reading only, then under the lock.
    plan = on_rank0(lambda: plan_launch(folder, candidate, options.resume), control)
    if plan.finished_line is not None:
        return plan.finished_line
    tuning = _kernel_tuning(options, world, folder)
    kernels = check_kernels(
        options.config,
        mode=options.mode,
        device=world.device,
        dtype=torch.bfloat16 if world.device.type == "cuda" else torch.float32,
        all_agree=partial(all_agree, collectives=control),
        tuner=tuning,
    )
    warnings += tuning.notes
    throughput = Throughput(
        flops_per_token=budget.training_flops_per_token,
        nominal_flops_per_token=budget.nominal_flops_per_token,
        peak=peak_flops(device_name(world.device)),
        world_size=world.world_size,
    )
    progress = ProgressLine(throughput, last_update=options.last_update, is_main=world.is_main)
    lock = _lock(world, folder, plan)
    try:
        plan = on_rank0(lambda: plan_launch(folder, candidate, options.resume), control)
        check_lock = lock.check if lock is not None else lambda: None
        choice = choose_checkpoint(folder.root, plan.record, options.resume, control, check_lock)
        evaluations = PresetEvaluations(options, world, plan.record, progress.console)
        model, optimizer, groups = _build(options, world, plan.record)
        on_rank0(lambda: _check_room(options, folder, plan, choice, evaluations, model, optimizer), control)
        if choice.path is not None:
            load_checkpoint(choice, dict(model.named_parameters()), optimizer, control, world.host)
        else:
            hook("initialized", 0, model)
            _check_equal_weights(world, model)
        batch_plan = plan_micro_batches(world.rank, world.world_size, protocol.global_batch_rows, options.micro_batch)
        devices = control.broadcast_object(control.gather_objects((world.host, device_name(world.device))))
        meta = attempt_meta(
            options,
            world,
            plan.record,
            candidate.code,
            choice,
            kernels,
            micro_batch=batch_plan.micro_batch,
            hosts=[host for host, _ in devices],
            devices=[device for _, device in devices],
        )
        journal = on_all_ranks(lambda: _open_journal(options, world, folder, plan, choice, tuning), control)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    session = Session(
        options=options,
        world=world,
        folder=folder,
        record=plan.record,
        choice=choice,
        journal=journal,
        lock=lock,
        data=data,
        plan=batch_plan,
        groups=groups,
        evaluations=evaluations,
        progress=progress,
        throughput=throughput,
        model=model,
        optimizer=optimizer,
        hook=hook,
    )
    _announce(session, plan, budget, warnings + plan.warnings, meta)
    return session


def _check_formal(options: TrainOptions, data: RunData) -> list[str]:
    problems: list[str] = []
    warnings: list[str] = []
    try:
        check_formal_code(options)
    except ProtocolError as error:
        problems.append(str(error))
    try:
        require_config(options.config, options.protocol)
    except ProtocolError as error:
        problems.append(str(error))
    try:
        warnings = check_formal_data(data, options.protocol)
    except ProtocolError as error:
        problems.append(str(error))
    if problems:
        raise ProtocolError(join_problems(problems))
    return warnings


def _lock(world: World, folder: RunFolder, plan: LaunchPlan) -> RunLock | None:
    """Takes the run folder on rank 0."""
    lock: list[RunLock] = []

    def acquire() -> None:
        try:
            folder.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot be made: {error.strerror}. Use another folder."
            raise CheckpointError(f"--output {str(folder.root)[:200]}: {reason}") from None
        lock.append(RunLock.acquire(folder.lock, attempt=plan.attempt, watch_seconds=world.limits.lock_watch))

    on_rank0(acquire, world.control)
    return lock[0] if lock else None


def _build(options: TrainOptions, world: World, record: RunRecord) -> tuple[Decoder, Optimizer, list[ParameterGroup]]:
    """Builds model and optimizer; rank 0 draws the initial weights, all ranks receive them."""
    model = build_model(options.config, world.device, seed=options.seed if world.is_main else None)
    broadcast_parameters(world, model)
    groups = partition_parameters(model.parameter_specs(), options.protocol)
    optimizer = Optimizer(
        dict(model.named_parameters()),
        groups,
        options.protocol,
        num_updates=record.num_updates,
        rank=world.rank,
        world_size=world.world_size,
        process_group=world.group,
    )
    return model, optimizer, groups


def _check_room(
    options: TrainOptions,
    folder: RunFolder,
    plan: LaunchPlan,
    choice: Choice,
    evaluations: PresetEvaluations,
    model: Decoder,
    optimizer: Optimizer,
) -> None:
    due = save_updates(options.protocol, first=choice.update, last=options.last_update, evaluated=evaluations.updates)
    check_space(
        folder.root,
        plan.record.run_id,
        options.retention,
        checkpoint_bytes=expected_bytes(dict(model.named_parameters()), optimizer),
        saves_due=len(due),
    )


def _check_equal_weights(world: World, model: Decoder) -> None:
    difference = find_difference(dict(model.named_parameters()), world.control, world.host)
    if difference:
        raise ProtocolError(f"Initial weights are not the same on all ranks: {difference}. Check that machine.")


def _kernel_tuning(options: TrainOptions, world: World, folder: RunFolder) -> KernelTuning:
    """Kernel tiles: the run's own, of this folder or of the one it is moved from, or the site's."""
    files = [folder.kernel_tuning]
    if options.resume not in ("auto", "never"):
        files.append(RunFolder(Path(options.resume).parent).kernel_tuning)
    return KernelTuning(world.control, world.device, cache_root=options.site.cache_root, run_files=files)


def _open_journal(
    options: TrainOptions,
    world: World,
    folder: RunFolder,
    plan: LaunchPlan,
    choice: Choice,
    tuning: KernelTuning,
) -> Journal:
    trackers = None
    if world.is_main:
        if plan.is_new:
            folder.create(plan.record)
        tuning.save(folder.kernel_tuning)
        folder.logs.mkdir(exist_ok=True)
        trackers = Trackers(
            list(options.site.trackers),
            project=options.site.tracker_project,
            run_id=plan.record.run_id,
            name=f"{plan.record.method}-{plan.record.mode}",
            config={"method": plan.record.method, "protocol": options.protocol.id, "mode": plan.record.mode},
            folder=folder.logs,
        )
    is_own = choice.path is not None and choice.path.parent.resolve() == folder.root.resolve()
    if is_own and world.is_main:
        assert choice.path is not None and choice.marker is not None
        if plan.attempt == 0:
            raise CheckpointError(
                f"{folder.events}: holds no attempt, but {choice.path.name} is complete: the log was lost or damaged. "
                f"Restore it, or continue in a new folder with '--resume {choice.path}'."
            )
        complete_log(folder, plan.attempt - 1, choice.path.name, choice.marker)
    journal = Journal(folder, plan.attempt, is_main=world.is_main, trackers=trackers)
    journal.last_update = choice.update
    if is_own and choice.path is not None:
        journal.checkpoint(choice.path, is_new=False)
    return journal


def _announce(session: Session, plan: LaunchPlan, budget: Budget, warnings: list[str], meta: dict[str, Any]) -> None:
    """Writes `attempt_start` and prints the header and everything that was noticed."""
    options, world, journal, choice = session.options, session.world, session.journal, session.choice
    journal.event(EventKey.ATTEMPT_START, plan.attempt, meta, update=choice.update)
    for skipped in choice.skipped:
        session.progress.say(skipped.message)
        detail = {"reason": skipped.reason, "file": skipped.file}
        journal.event(EventKey.CHECKPOINT_SKIPPED, skipped.path.name, detail, update=choice.update)
    used = session.plan.micro_batch
    if used != options.micro_batch:
        warnings.append(
            f"--micro-batch {options.micro_batch} is more than a rank's share of the batch; {used} is used instead."
        )
        journal.event(
            EventKey.SETTING_IGNORED,
            "micro_batch",
            {"given": options.micro_batch, "used": used},
            update=choice.update,
        )
    for found in meta["kernels"]["choices"]:
        if found["problem"] is not None:
            journal.event(EventKey.FALLBACK, found["op"], found, update=choice.update)
    journal.state("running", choice.update)
    for warning in warnings:
        session.progress.say(f"warning: {warning}")
    backend = "fp32, eager"
    if world.device.type == "cuda":
        assert session.model is not None
        used = dict.fromkeys(block.attn.backend() for block in session.model.blocks)
        backend = f"bf16 compute, fp32 weights; {', '.join(used)}"
    epochs = session.data.rows.num_epochs(options.last_update)
    session.progress.say(
        run_header(options, world, session.plan, budget, session.groups, epochs=epochs, backend=backend)
    )
    session.progress.say(f"attempt     {plan.attempt}: {choice.message}")
