"""The evaluations a run owes: at preset updates, on saved weights, once each; and the final one from disk."""

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from nexttransformer import jsonio
from nexttransformer.evaluation.inputs import EvaluationInputs, open_inputs
from nexttransformer.evaluation.results import EvaluationRecord, write_record
from nexttransformer.evaluation.scoring import (
    CURVE_SPLIT,
    FINAL_SPLIT,
    Subject,
    evaluate_checkpoint,
    evaluate_model,
    open_checkpoint,
)
from nexttransformer.models import Decoder
from nexttransformer.training.checkpoint_schema import CompleteMarker
from nexttransformer.training.collectives import on_all_ranks, on_rank0
from nexttransformer.training.distributed import World
from nexttransformer.training.events import EventKey, read_events
from nexttransformer.training.journal import Journal
from nexttransformer.training.options import TrainOptions
from nexttransformer.training.run_folder import EvaluationKind
from nexttransformer.training.run_schema import RunRecord

SMOKE_ROWS = 64


@dataclass(frozen=True)
class EvaluatedWeights:
    """Identity of weights: the marker of their checkpoint, or the digest alone at update 0."""

    update: int
    weights_digest: str
    complete_digest: str | None

    @classmethod
    def of_marker(cls, marker: CompleteMarker) -> "EvaluatedWeights":
        """Returns the identity of saved weights."""
        return cls(marker.update, marker.weights_digest, marker.complete_digest)


class PresetEvaluations:
    """What is due when, and doing it. Methods that score are collective."""

    def __init__(self, options: TrainOptions, world: World, record: RunRecord, console: Console) -> None:
        """Opens and hashes what the evaluations read, so that nothing is missing when they are due.

        Raises:
            DataError: a split or the bundle is missing or damaged, on all ranks.
        """
        self._options, self._world, self._record, self._console = options, world, record, console
        is_smoke, last = options.mode == "smoke", options.last_update
        protocol, wanted = options.protocol, options.evaluations
        has_bpb, has_core = is_smoke or "bpb" in wanted, not is_smoke and "core" in wanted
        self._bpb_updates = {last} if is_smoke else set(protocol.bpb_updates(last)) if has_bpb else set()
        self._core_updates = set(protocol.core_updates(last)) if has_core else set()
        self.has_final = not is_smoke and "bpb" in wanted
        self._num_bpb_rows = SMOKE_ROWS if is_smoke else None
        self._inputs: EvaluationInputs | None = None
        if has_bpb or has_core:
            splits = () if not has_bpb else (CURVE_SPLIT, FINAL_SPLIT) if self.has_final else (CURVE_SPLIT,)
            self._inputs = on_all_ranks(
                lambda: open_inputs(options.site, protocol, splits=splits, want_core=has_core), world.control
            )

    @property
    def updates(self) -> set[int]:
        """Completed updates at which anything is due."""
        return self._bpb_updates | self._core_updates

    def due(self, update: int) -> list[EvaluationKind]:
        """Returns what is due at a number of completed updates."""
        kinds: list[EvaluationKind] = ["val_curve"] if update in self._bpb_updates else []
        return [*kinds, "core"] if update in self._core_updates else kinds

    def missing(self, journal: Journal, weights: EvaluatedWeights) -> list[EvaluationKind]:
        """Returns what is due for resumed weights and was not completed: no file, no event, or other weights."""

        def look() -> list[EvaluationKind]:
            folder = journal.folder
            digests = {
                event.meta.get("file"): event.meta.get("file_digest")
                for event in read_events(folder.events).events
                if event.key == EventKey.EVALUATION.value
            }
            return [
                kind
                for kind in self.due(weights.update)
                if folder.evaluation_is_due(kind, weights.update, weights.weights_digest)
                or digests.get(f"evaluations/{folder.evaluation(kind, weights.update).name}")
                != jsonio.file_digest(folder.evaluation(kind, weights.update))
            ]

        return on_rank0(look, self._world.control)

    def run(
        self, model: Decoder, journal: Journal, weights: EvaluatedWeights, kinds: list[EvaluationKind]
    ) -> float | None:
        """Scores training's own model; writes file and event of each kind. Returns the BPB if one is among them."""
        record, bpb = self._record, None
        assert self._inputs is not None
        for kind in kinds:
            began = time.monotonic()
            result = evaluate_model(
                model,
                self._inputs,
                Subject(
                    run_id=record.run_id,
                    mode=record.mode,
                    method=record.method,
                    update=weights.update,
                    complete_digest=weights.complete_digest,
                    weights_digest=weights.weights_digest,
                ),
                kind=kind,
                splits=(CURVE_SPLIT,) if kind == "val_curve" else (),
                want_core=kind == "core",
                micro_batch=self._options.micro_batch,
                collectives=self._world.control,
                num_bpb_rows=self._num_bpb_rows,
                console=self._console,
            )
            self._write(journal, kind, result, time.monotonic() - began)
            bpb = result.bpb[CURVE_SPLIT].bpb if CURVE_SPLIT in result.bpb else bpb
        if self._world.device.type == "cuda":
            # Prompts of many lengths leave the cache in pieces; the next update needs large ones.
            torch.cuda.empty_cache()
        return bpb

    def final(self, journal: Journal, marker: CompleteMarker) -> None:
        """Loads the final checkpoint from disk as the `evaluate` command does and scores both splits.

        The training model and optimizer must be freed before.
        """
        gc.collect()
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()
        began = time.monotonic()
        self._inputs = None
        checkpoint = open_checkpoint(journal.folder.checkpoint(marker.update), self._world.control)
        result = evaluate_checkpoint(
            checkpoint,
            self._options.site,
            kind="final",
            want_bpb=True,
            want_core=False,
            micro_batch=self._options.micro_batch,
            device=self._world.device,
            collectives=self._world.control,
            console=self._console,
        )
        self._write(journal, "final", result, time.monotonic() - began)
        if self._world.is_main:
            self._compare(journal, result)

    def _write(self, journal: Journal, kind: EvaluationKind, result: EvaluationRecord, seconds: float) -> None:
        def write() -> str:
            path = journal.folder.evaluation(kind, result.update)
            write_record(path, result)
            return jsonio.file_digest(path)

        digest = on_rank0(write, self._world.control)
        meta: dict[str, Any] = {
            "file": f"evaluations/{journal.folder.evaluation(kind, result.update).name}",
            "file_digest": digest,
            "complete_digest": result.checkpoint.complete_digest,
            "seconds": seconds,
        }
        values: dict[str, float] = {}
        if kind == "core":
            core = result.core
            meta["core_v1"] = core.core_v1 if core else None
            values = {"core/v1": core.core_v1} if core and core.core_v1 is not None else {}
        else:
            split = FINAL_SPLIT if kind == "final" else CURVE_SPLIT
            meta["bpb"] = result.bpb[split].bpb if split in result.bpb else None
            values = {f"bpb/{name}": score.bpb for name, score in result.bpb.items()}
        journal.event(EventKey.EVALUATION, kind, meta, update=result.update)
        journal.track(values, result.update)
        if self._world.is_main:
            shown = ", ".join(f"{name} {value:.6f}" for name, value in values.items()) or "no value"
            if kind == "core" and result.core is not None and result.core.core_limited is not None:
                shown = f"limited CORE {result.core.core_limited:.6f} (excerpt rows)"
            self._console.print(f"evaluation {kind} at update {result.update:,}: {shown}", markup=False)
            for line in result.errors:
                self._console.print(f"evaluation {kind}: missing value: {line}", markup=False)

    def _compare(self, journal: Journal, final: EvaluationRecord) -> None:
        """Says loudly if the fresh load does not reproduce the in-training value (the audit refuses it: E2)."""
        path = journal.folder.evaluation("val_curve", final.update)
        if not path.exists() or CURVE_SPLIT not in final.bpb:
            return
        trained = EvaluationRecord.read(path).bpb.get(CURVE_SPLIT)
        tolerance = self._options.protocol.bpb_reload_tolerance
        if trained is not None and abs(trained.bpb - final.bpb[CURVE_SPLIT].bpb) > tolerance:
            self._console.print(
                f"WARNING: {CURVE_SPLIT} in training was {trained.bpb:.6f}, from the saved checkpoint it is "
                f"{final.bpb[CURVE_SPLIT].bpb:.6f}: more than {tolerance} apart. The audit will refuse this run.",
                markup=False,
            )
