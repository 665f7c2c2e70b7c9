"""Part of P5: which kernels ran, that they passed their self-check, and that their tiles stayed the same."""

from collections.abc import Iterator

from nexttransformer.audit.check import Finding, differs, error
from nexttransformer.audit.event_schema import KernelChoice
from nexttransformer.audit.run_view import RunView
from nexttransformer.training.tuning_document import TUNING_FILE

# Paths whose kernels have a choice of tiles; see `ops.backends`.
_TUNED_PATHS = ("fla", "kda_broadcast")


def kernel_findings(view: RunView) -> Iterator[Finding]:
    """Compares implementations and tiles over all attempts; those of a formal run passed and are recorded.

    Another kind of GPU has tiles of its own, so only attempts on the same kinds are compared.
    """
    starts = view.attempt_starts
    paths = _paths(starts[0][1].kernels.choices)
    first: dict[frozenset[str], str | None] = {}
    recorded = set()
    for logged, meta in starts:
        where, verdict = f"{logged.where} meta.kernels", meta.kernels
        got = _paths(verdict.choices)
        yield from differs("Kernels differ between attempts: what ran", f"{where}.choices", expected=paths, got=got)
        if meta.mode == "formal" and not verdict.passed:
            yield error("The kernel self-check did not pass.", f"{where}.passed", expected=True, got=False)
        digest = None if verdict.tuning is None else verdict.tuning.digest
        if meta.mode == "formal" and digest is None and any(each.path in _TUNED_PATHS for each in verdict.choices):
            yield error("The tiles of kernels that have a choice are not recorded.", f"{where}.tuning")
        expected = first.setdefault(frozenset(meta.gpus), digest)
        yield from differs(
            "Kernels differ between attempts: their tuning", f"{where}.tuning", expected=expected, got=digest
        )
        recorded.add(digest)
    yield from _file_findings(view, recorded - {None})


def _paths(choices: list[KernelChoice]) -> dict[str, str]:
    return {each.op: f"{each.path}, guard {each.guard}" for each in choices}


def _file_findings(view: RunView, recorded: set[str]) -> Iterator[Finding]:
    """The tiles in the run folder are those of an attempt."""
    if recorded and not view.files.is_file(TUNING_FILE):
        yield error("The tiles of the kernels are missing.", TUNING_FILE)
    document = view.tuning.value
    if document is not None and document.digest not in recorded:
        yield error("The tiles are those of no attempt.", TUNING_FILE, expected=sorted(recorded), got=document.digest)
