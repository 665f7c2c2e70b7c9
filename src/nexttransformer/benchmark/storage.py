"""Speed of checkpoints: one real save and one real load in a temporary folder."""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from nexttransformer.benchmark.options import BenchOptions
from nexttransformer.benchmark.subject import Subject
from nexttransformer.benchmark.timing import synchronize
from nexttransformer.data.order import initial_chain, to_hex
from nexttransformer.training import checkpoint_files
from nexttransformer.training.checkpoint import save_checkpoint
from nexttransformer.training.checkpoint_choice import Choice
from nexttransformer.training.checkpoint_load import load_checkpoint
from nexttransformer.training.checkpoint_schema import CheckpointDigests, ProtocolFile, TrainerState
from nexttransformer.training.collectives import on_rank0

_NO_DIGEST = "0" * 64


def measure_checkpoint(subject: Subject, options: BenchOptions) -> dict[str, Any]:
    """Saves and loads weights and optimizer state as a run does. Collective.

    The load follows the save, so files may come from the page cache; a resume after a restart reads the disk.
    """
    world, protocol = subject.world, subject.protocol
    root = Path(on_rank0(lambda: str(_make_folder(options)), world.control))
    parameters, optimizer = subject.parameters, subject.optimizer
    state = _state(subject, options)
    synchronize(world.device)
    try:
        saved = save_checkpoint(
            root,
            state=state,
            model_config=subject.config.to_dict(),
            protocol=ProtocolFile(id=protocol.id, digest=protocol.digest, constants=protocol.constants()),
            parameters=parameters,
            optimizer=optimizer,
            group_of={name: group.settings.name for group in subject.groups for name in group.names},
            collectives=world.control,
        )
        start = time.perf_counter()
        checkpoint_files.verify_checkpoint(saved.path, world.control)
        verify_seconds = time.perf_counter() - start
        start = time.perf_counter()
        choice = Choice(saved.path, saved.marker, state, [], "")
        load_checkpoint(choice, parameters, optimizer, world.control, world.host)
        synchronize(world.device)
        load_seconds = time.perf_counter() - start
    finally:
        world.control.barrier()
        on_rank0(lambda: shutil.rmtree(root, ignore_errors=True), world.control)
    return {
        "num_bytes": saved.num_bytes,
        "save_seconds": saved.seconds,
        "save_bytes_per_second": saved.num_bytes / saved.seconds,
        "verify_seconds": verify_seconds,
        "load_seconds": load_seconds,
        "load_bytes_per_second": saved.num_bytes / (verify_seconds + load_seconds),
        "is_page_cached": True,
    }


def _make_folder(options: BenchOptions) -> Path:
    """Makes the temporary folder: in the site's scratch space, else beside the output, else where the system says."""
    parent = None
    if options.site is not None:
        parent = options.site.scratch_root
        parent.mkdir(parents=True, exist_ok=True)
    elif options.output is not None:
        parent = options.output.resolve().parent
    return Path(tempfile.mkdtemp(prefix="bench_checkpoint_", dir=parent))


def _state(subject: Subject, options: BenchOptions) -> TrainerState:
    protocol, update = subject.protocol, subject.optimizer.num_updates_done
    no_data = dict.fromkeys(CheckpointDigests.model_fields, _NO_DIGEST)
    return TrainerState(
        run_id="0" * 16,
        mode="open",
        method=subject.config.method,
        update=update,
        num_updates=protocol.num_updates,
        last_update=protocol.num_updates,
        seed=protocol.seed,
        tokens_seen=update * protocol.tokens_per_update,
        next_row=update * protocol.global_batch_rows,
        data_chain=to_hex(initial_chain()),
        optimizer_updates=update,
        spike_losses=[],
        num_spikes=0,
        attempt=0,
        world_size=subject.world.world_size,
        micro_batch=1,
        digests=CheckpointDigests(**{**no_data, "config": subject.config.digest, "protocol": protocol.digest}),
    )
