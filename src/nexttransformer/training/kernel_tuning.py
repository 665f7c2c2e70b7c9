"""One choice of kernel tiles for all ranks and all attempts of a run, and where it is stored.

Rank 0 reads what is known, runs each operation once so that the rest is measured, and gives the result to all:
the kernels that are checked and trained with are the same everywhere. A choice is looked for in the run folder, in
the site's cache and in the package, in this order; otherwise it is measured, and stored in the site's cache. The
run folder gets exactly the choices in use, whose digest is recorded.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nexttransformer import jsonio
from nexttransformer.config import ModelConfig
from nexttransformer.errors import CheckpointError, ConfigError, path_problem
from nexttransformer.ops import backends, tuning
from nexttransformer.ops.self_check import needs_fla_core
from nexttransformer.ops.tuning import Choices
from nexttransformer.training.collectives import Collectives, on_all_ranks, on_rank0
from nexttransformer.training.run_folder import RunFolder
from nexttransformer.training.tuning_document import TuningDocument, file_name, make_document, refusal
from nexttransformer.training.versions import device_name

PACKAGE_FOLDER = Path(tuning.__file__).parent / "tuned"
# From the strongest to the weakest; a set of choices is called by its weakest.
_SOURCES = ("run", "site", "package", "measured")


class KernelTuning:
    """The kernel tiles of one launch; does nothing until a kernel of fla-core is to be tuned.

    Attributes:
        notes: what should be said, one line each; on rank 0.
    """

    def __init__(
        self,
        control: Collectives,
        device: torch.device,
        *,
        cache_root: Path,
        run_files: Sequence[Path] = (),
        say: Callable[[str], None] = print,
    ) -> None:
        """Reads nothing yet.

        Args:
            control: all ranks.
            device: this rank's.
            cache_root: the site's cache.
            run_files: documents of the run, the first that is there counts.
            say: prints a line, on rank 0.
        """
        self.notes: list[str] = []
        self._control, self._device = control, device
        self._cache_root, self._run_files, self._say = cache_root, tuple(run_files), say
        self._machine: tuple[str, str, str] | None = None
        self._sources: dict[str, Choices] = {}
        self._document: TuningDocument | None = None
        self._source = _SOURCES[0]

    def complete(self, exercise: Callable[[], None]) -> None:
        """Runs the exercise on rank 0 with the known tiles, measuring what is missing, and gives all ranks the result.

        The other ranks wait, within the control group's limit for each operation. A kernel that fails here fails
        in its self-check right after, which all ranks hear of.

        Raises:
            ConfigError: a stored document is damaged or names tiles that its kernel does not have; on all ranks.
        """
        self._document, self._source = on_rank0(lambda: self._tune(exercise), self._control)
        on_all_ranks(self._follow, self._control)

    def restore(self) -> None:
        """Gives all ranks the known tiles and measures none; what no document names, each kernel measures by itself.

        Raises:
            ConfigError: as `complete` does.
        """
        known = on_rank0(self._open, self._control)

        def follow() -> None:
            if self._control.rank != 0:
                self._load()
                tuning.install(known)

        on_all_ranks(follow, self._control)

    def finish(self) -> dict[str, str] | None:
        """Fixes the tiles, stores measured ones in the site's cache, and returns digest and source, or None."""
        if self._document is None or not self._document.kernels:
            return None
        choices = self._document.choices()
        on_all_ranks(lambda: tuning.install(choices, is_final=True), self._control)
        if self._control.rank == 0 and self._source == "measured":
            self._store_at_site(choices)
        return {"digest": self._document.digest, "source": self._source}

    def save(self, path: Path) -> None:
        """Writes the tiles in use to the run folder, unless they are there. On rank 0.

        Raises:
            CheckpointError: if it cannot be written.
        """
        if self._document is None or not self._document.kernels:
            return
        content = jsonio.pretty_bytes(self._document.to_json())
        try:
            if not path.is_file() or path.read_bytes() != content:
                jsonio.write_bytes_atomic(path, content)
        except OSError as problem:
            raise CheckpointError(f"{path}: cannot be written: {problem.strerror}. Use another --output.") from None

    def _tune(self, exercise: Callable[[], None]) -> tuple[TuningDocument, str]:
        """Rank 0's part: returns the tiles in use so far, and where the least certain came from."""
        if self._machine is None and not self._open():
            self._say("kernels     measuring tiles once for this kind of GPU; takes minutes, then they are stored")
        assert self._machine is not None
        try:
            exercise()
        # Whatever a kernel does here it does in its self-check too, where failing is a verdict; see `check_path`.
        except Exception as error:  # noqa: BLE001
            self.notes.append(f"kernel tuning: {type(error).__name__}: {str(error).strip()}".splitlines()[0][:300])
        choices = tuning.collect()
        return make_document(self._machine, choices), self._weakest_source(choices)

    def _open(self) -> Choices:
        """Reads and installs what is known, on rank 0, and returns it."""
        found = backends.versions()
        self._machine = (device_name(self._device), str(found.triton), str(found.fla_core))
        self._load()
        try:
            self._sources = {source: self._read(path) for source, path in self._places().items()}
        except OSError as problem:
            raise ConfigError(path_problem(problem)) from None
        known = {item: tile for source in reversed(self._sources.values()) for item, tile in source.items()}
        tuning.install(known)
        return known

    def _follow(self) -> None:
        # Rank 0 keeps what it knows about operations that have not been run yet.
        if self._control.rank != 0 and self._document is not None:
            self._load()
            tuning.install(self._document.choices())

    def _load(self) -> None:
        try:
            tuning.load_kernels()
        except ImportError as error:
            self.notes.append(f"kernel tuning: fla-core cannot be imported: {error}")

    def _places(self) -> dict[str, Path]:
        assert self._machine is not None
        name = file_name(self._machine)
        run_file = next((path for path in self._run_files if path.exists()), None)
        run = {} if run_file is None else {"run": run_file}
        return {**run, "site": self._cache_root / "tuning" / name, "package": PACKAGE_FOLDER / name}

    def _read(self, path: Path) -> Choices:
        """Returns the choices of a document, none where it is absent or of another kind of machine."""
        if not path.exists():
            return {}
        document = TuningDocument.read_choices(path)
        if document.machine != self._machine:
            made, here = (" ".join(", ".join(parts).split())[:200] for parts in (document.machine, self._machine or ()))
            self.notes.append(f"{path}: tuned on other versions or another GPU ({made}), not used here ({here}).")
            return {}
        choices = document.choices()
        problems = tuning.refused(choices)
        if problems:
            more = f" ({len(problems) - 1} more.)" if len(problems) > 1 else ""
            raise ConfigError(refusal(path, f"{path}: {problems[0]}{more}"))
        return choices

    def _weakest_source(self, choices: Choices) -> str:
        sources = [
            next((source for source, known in self._sources.items() if item in known), "measured") for item in choices
        ]
        return max(sources, key=_SOURCES.index, default=_SOURCES[0])

    def _store_at_site(self, choices: Choices) -> None:
        """Adds choices to the site's document, where another launch may have written meanwhile; its own stay."""
        assert self._machine is not None
        path = self._places()["site"]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            document = make_document(self._machine, {**choices, **self._read(path)})
            jsonio.write_json_atomic(path, document.to_json())
        except (OSError, ConfigError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else problem
            self.notes.append(f"{path}: kernel tuning could not be stored ({reason}); other runs tune again.")


def restore_tiles(
    config: ModelConfig,
    checkpoint: Path,
    *,
    control: Collectives,
    device: torch.device,
    cache_root: Path,
    say: Callable[[str], None] = print,
) -> None:
    """Lets a model that is only evaluated run with its run's tiles or this machine's, without measuring. Collective.

    Args:
        config: of the model.
        checkpoint: its folder; the run's tiles are beside it.
        control: all ranks.
        device: this rank's.
        cache_root: the site's cache.
        say: prints a line, on rank 0.

    Raises:
        ConfigError: as `KernelTuning.complete` does.
    """
    if device.type != "cuda" or not needs_fla_core(config):
        return
    if not on_rank0(lambda: backends.missing_package(backends.versions()) is None, control):
        return
    # Resolved: the parent of "." is "." again.
    run_file = RunFolder(checkpoint.resolve().parent).kernel_tuning
    known = KernelTuning(control, device, cache_root=cache_root, run_files=[run_file], say=say)
    known.restore()
    for note in known.notes if control.rank == 0 else ():
        say(note)
