"""L1 to L5: files, kind and completeness of the run, identity of the method, schemas, names."""

from collections.abc import Iterator

from nexttransformer.audit import folder as folders
from nexttransformer.audit.cell import guarded
from nexttransformer.audit.check import Finding, check, differs, error, warning
from nexttransformer.audit.run_view import RunView
from nexttransformer.config import method_files
from nexttransformer.errors import suggest
from nexttransformer.training.checkpoint_files import checkpoint_name
from nexttransformer.training.events import EventKey


@check("L1")
def check_files(view: RunView) -> Iterator[Finding]:
    """Compares the folder's entries with those of a complete run."""
    entries, expected = view.files.entries, folders.expected_entries(view.reference.protocol)
    for name, kind in expected.items():
        if name not in entries:
            yield error("An expected file or folder is missing.", name, expected=kind)
        elif entries[name].kind != kind:
            yield error("An expected file or folder is something else.", name, expected=kind, got=entries[name].kind)
    for name, entry in entries.items():
        if name not in expected and not folders.is_allowed(name, entry.kind):
            yield warning("Not part of a run; the audit does not look at it.", name, got=entry.kind)


@check("L2")
def check_kind(view: RunView) -> Iterator[Finding]:
    """Every witness of the mode, and the signs of a complete run."""
    if folders.LOCK_FILE in view.files.entries:
        yield error(
            "The run is locked: a launch may still be writing. Let it end; if none is running, remove the file.",
            folders.LOCK_FILE,
        )
    yield from guarded({"modes": lambda: _modes(view), "end": lambda: _end(view), "state": lambda: _state(view)})


def _modes(view: RunView) -> Iterator[Finding]:
    expected = view.reference.mode
    witnesses: dict[str, str | None] = {}
    if view.run.value is not None:
        witnesses["run.json mode"] = view.run.value.mode
        yield from differs(
            "The length of a smoke run", "run.json smoke_updates", expected=None, got=view.run.value.smoke_updates
        )
    for checkpoint in view.checkpoints.values():
        for cell in (checkpoint.marker, checkpoint.state):
            if cell.value is not None:
                witnesses[f"{cell.where} mode"] = cell.value.mode
        if checkpoint.header is not None and checkpoint.header.value is not None:
            witnesses[f"{checkpoint.header.where} metadata.mode"] = checkpoint.header.value.metadata.get("mode")
    for name, cell in view.evaluations.items():
        if cell.value is not None:
            witnesses[f"{name} mode"] = cell.value.mode
    for where, mode in witnesses.items():
        yield from differs(f"The run is not {expected}: the mode", where, expected=expected, got=mode)
    for logged, meta in view.attempt_starts:
        yield from differs(
            f"The run is not {expected}: the mode", f"{logged.where} meta.mode", expected=expected, got=meta.mode
        )


def _end(view: RunView) -> Iterator[Finding]:
    log, last = view.events.get(), view.reference.protocol.num_updates
    ends = log.of(EventKey.RUN_END)
    if not ends or log.events[-1] is not ends[-1] or log.last_line != ends[-1].line:
        yield error(
            "The run is not finished: run_end is not the last event. Repeat the train command to finish it.",
            f"events.jsonl:{log.last_line}",
            expected="run_end",
            got=log.events[-1].event.key if log.events else "nothing",
        )
    for extra in ends[:-1]:
        yield error("run_end is there more than once.", extra.where)
    for end in ends[-1:]:
        yield from differs("The update of run_end", end.where, expected=last, got=end.event.update)
        folder = getattr(end.meta, "checkpoint", None)
        yield from differs(
            "The final checkpoint", f"{end.where} meta.checkpoint", expected=checkpoint_name(last), got=folder
        )
        outcomes = [each for each in log.of(EventKey.ATTEMPT_END) if each.line < end.line]
        yield from differs(
            "The end of the last attempt",
            end.where,
            expected="finished",
            got=outcomes[-1].event.value if outcomes else None,
        )


def _state(view: RunView) -> Iterator[Finding]:
    state = view.state.get()
    yield from differs("The state of the run", "run_state.json status", expected="finished", got=state.status)
    last = view.reference.protocol.num_updates
    yield from differs("The last update", "run_state.json update", expected=last, got=state.update)


@check("L3")
def check_method(view: RunView) -> Iterator[Finding]:
    """One method id everywhere."""
    registered, method = method_files(), view.method
    if method not in registered:
        yield error(f"'{method}' is no registered method.{suggest(method, registered)}", "configs", got=method)
    else:
        family = registered[method].parent.name
        if view.run.value is not None:
            yield from differs("The family", "run.json family", expected=family, got=view.run.value.family)
            recorded = view.run.value.config.get("family")
            yield from differs("The family", "run.json config.family", expected=family, got=recorded)
    witnesses: dict[str, object] = {}
    if view.run.value is not None:
        witnesses["run.json method"] = view.run.value.method
        witnesses["run.json config.method"] = view.run.value.config.get("method")
    for checkpoint in view.checkpoints.values():
        for cell in (checkpoint.marker, checkpoint.state):
            if cell.value is not None:
                witnesses[f"{cell.where} method"] = cell.value.method
        if checkpoint.header is not None and checkpoint.header.value is not None:
            witnesses[f"{checkpoint.header.where} metadata.method"] = checkpoint.header.value.metadata.get("method")
    for name, cell in view.evaluations.items():
        if cell.value is not None:
            witnesses[f"{name} method"] = cell.value.method
    for where, got in witnesses.items():
        yield from differs("The method", where, expected=method, got=got)
    view.run.get()


@check("L4")
def check_schemas(view: RunView) -> Iterator[Finding]:
    """Everything that was found malformed while reading."""
    for where, message in view.files.problems:
        yield error(message, where)


@check("L5")
def check_names(view: RunView) -> Iterator[Finding]:
    """Regular files with plain names."""
    for name, entry in view.files.entries.items():
        if not all(folders.SAFE_NAME.fullmatch(part) for part in name.split("/")):
            yield warning("Names may have letters, digits and . _ - only.", name)
        if entry.kind in ("link", "other"):
            yield warning("Only regular files and folders may be in a run.", name, got=entry.kind)
