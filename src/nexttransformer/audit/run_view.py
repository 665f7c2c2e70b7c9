"""A run folder, read once: every file parsed or its problem noted, and the effective timeline."""

import hashlib
from functools import cached_property
from pathlib import Path

from nexttransformer.audit import folder as folders
from nexttransformer.audit import reader
from nexttransformer.audit.cell import Cell
from nexttransformer.audit.check import Needs
from nexttransformer.audit.checkpoint_view import CheckpointView
from nexttransformer.audit.event_schema import AttemptStart
from nexttransformer.audit.files import RunFiles
from nexttransformer.audit.logs import EventLog, LoggedEvent, Metrics, read_events
from nexttransformer.audit.model_facts import ModelFacts, model_facts
from nexttransformer.audit.reference import Reference
from nexttransformer.audit.timeline_view import Timeline, build_timeline
from nexttransformer.config import ModelConfig
from nexttransformer.errors import AuditError
from nexttransformer.evaluation.results import EvaluationRecord
from nexttransformer.training.checkpoint_files import checkpoint_name
from nexttransformer.training.events import EventKey
from nexttransformer.training.run_schema import RunRecord, RunState
from nexttransformer.training.tuning_document import TUNING_FILE, TuningDocument


class RunView:
    """Everything the checks look at.

    Attributes:
        root, method, reference: what is judged, as whose run, by what.
        files: entries of the folder and the problems found while reading.
        run, state, events, metrics: the four files at the top.
        tuning: kernel tiles of the run, where it has such a file.
        evaluations: file name -> record, of every JSON file in `evaluations/` and every expected one.
        checkpoints: update -> checkpoint folder.
    """

    def __init__(self, root: Path, method: str, reference: Reference) -> None:
        """Reads the folder.

        Raises:
            AuditError: there is nothing of a run at `root`.
        """
        self.root, self.method, self.reference = root, method, reference
        try:
            if not root.is_dir():
                raise AuditError(f"{root}: not a folder. Expected the folder that train wrote with --output.")
            self.files = RunFiles(root, folders.list_entries(root))
        except OSError as problem:
            raise AuditError(f"{root}: cannot be read: {problem.strerror}.") from None
        if not any(self.files.is_file(name) for name in ("run.json", "events.jsonl", "metrics.jsonl")):
            raise AuditError(f"{root}: no run.json, events.jsonl or metrics.jsonl in it, so this is no run folder.")
        files = self.files
        self.run: Cell[RunRecord] = files.record("run.json", RunRecord)
        self.state: Cell[RunState] = files.record("run_state.json", RunState)
        self.events: Cell[EventLog] = files.load("events.jsonl", lambda path: read_events(path, files.report))
        self.metrics: Cell[Metrics] = files.load("metrics.jsonl", lambda path: Metrics(path, files.report))
        self.tuning: Cell[TuningDocument] = files.record(TUNING_FILE, TuningDocument)
        names = dict.fromkeys(folders.expected_evaluations(reference.protocol))
        names |= dict.fromkeys(
            name for name in files.entries if name.startswith("evaluations/") and name.endswith(".json")
        )
        self.evaluations: dict[str, Cell[EvaluationRecord]] = {
            name: files.record(name, EvaluationRecord) for name in sorted(names)
        }
        found = {int(match[1]) for name in files.entries if (match := folders.CHECKPOINT_NAME.fullmatch(name))}
        updates = sorted(update for update in found if files.entries[checkpoint_name(update)].kind == "folder")
        self.checkpoints = {
            update: CheckpointView(files, update, is_newest=update == updates[-1]) for update in updates
        }

    @cached_property
    def timeline(self) -> Timeline:
        """The effective timeline; Needs if events or metrics cannot be used."""
        return build_timeline(self.events.get(), self.metrics.get(), self.reference.protocol.num_updates)

    @property
    def newest(self) -> CheckpointView:
        """The newest checkpoint: in a complete run the final one. Needs if there is none."""
        if not self.checkpoints:
            raise Needs("Needs the final checkpoint, and there is none; see L1.", "checkpoints")
        return self.checkpoints[max(self.checkpoints)]

    @property
    def attempt_starts(self) -> list[tuple[LoggedEvent, AttemptStart]]:
        """Every attempt's start; Needs if one is malformed or there is none."""
        starts = self.events.get().of(EventKey.ATTEMPT_START)
        if not starts:
            raise Needs("Needs the start of an attempt, and there is none.", "events.jsonl")
        result = []
        for logged in starts:
            if not isinstance(logged.meta, AttemptStart):
                raise Needs("Needs the start of an attempt, which is malformed; see L4.", logged.where)
            result.append((logged, logged.meta))
        return result

    @property
    def config(self) -> ModelConfig:
        """The registered configuration of the recorded method, from which all models of the audit are built."""
        run = self.run.get()
        return self.reference.registered_config(run.code.commit, run.family, run.method)

    @property
    def facts(self) -> ModelFacts:
        """What the registered configuration's model is: sizes, tensors, groups."""
        return model_facts(self.config, self.reference.protocol)

    def evaluation(self, name: str) -> Cell[EvaluationRecord]:
        """Returns a cell of `evaluations/`, by file name."""
        return self.evaluations[f"evaluations/{name}"]

    def run_digest(self) -> str:
        """Returns the SHA-256 over `path TAB bytes TAB sha256 LF` of the small files and the final marker, sorted."""
        names = ["run.json", "events.jsonl", "metrics.jsonl"]
        names += [name for name in self.files.entries if name.startswith("evaluations/")]
        names += [f"{self.newest.name}/complete.json"] if self.checkpoints else []
        lines = []
        for name in sorted(name for name in names if self.files.is_file(name)):
            num_bytes, digest = reader.hash_file(self.root / name)
            lines.append(f"{name}\t{num_bytes}\t{digest}\n")
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
