"""One checkpoint folder of a run, as far as the audit reads it."""

from functools import cached_property
from typing import Any

from nexttransformer.audit import reader
from nexttransformer.audit.cell import Cell
from nexttransformer.audit.files import RunFiles
from nexttransformer.training import checkpoint_files as names
from nexttransformer.training.checkpoint_schema import CompleteMarker, OptimizerIndex, ProtocolFile, TrainerState


class CheckpointView:
    """A checkpoint; of older ones only marker and trainer state are read.

    Attributes:
        update, name: of the folder.
        marker, state: `complete.json` and `trainer_state.json`.
        config, protocol, index, header: further files, of the newest checkpoint only (None elsewhere).
    """

    def __init__(self, files: RunFiles, update: int, *, is_newest: bool) -> None:
        self._files = files
        self.update, self.name, self.is_newest = update, names.checkpoint_name(update), is_newest
        self.marker: Cell[CompleteMarker] = files.record(self.path(names.MARKER_FILE), CompleteMarker)
        self.state: Cell[TrainerState] = files.record(self.path(names.STATE_FILE), TrainerState)
        self.config: Cell[Any] | None = None
        self.protocol: Cell[ProtocolFile] | None = None
        self.index: Cell[OptimizerIndex] | None = None
        self.header: Cell[reader.SafetensorsHeader] | None = None
        if is_newest:
            self.config = files.json(self.path(names.CONFIG_FILE))
            self.protocol = files.record(self.path(names.PROTOCOL_FILE), ProtocolFile)
            self.index = files.record(self.path(names.INDEX_FILE), OptimizerIndex)
            self.header = files.load(self.path(names.MODEL_FILE), reader.read_safetensors_header)

    def path(self, file: str) -> str:
        """Returns a file's path relative to the run folder."""
        return f"{self.name}/{file}"

    @cached_property
    def found_files(self) -> list[str]:
        """Names in the folder."""
        prefix = f"{self.name}/"
        return [name.removeprefix(prefix) for name in self._files.entries if name.startswith(prefix)]
