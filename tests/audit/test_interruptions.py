"""Honest runs that were interrupted at a bad moment are not refused for it."""

from pathlib import Path

import pytest

from nexttransformer.audit.reference import Reference
from nexttransformer.audit.report import audit_run
from tests.finished_run import METHOD
from tests.training.trainer_runs import arguments, train_rank

# Without evaluations nothing more is expected to be wrong.
EXPECTED = {"L1", "T3", "E1", "E3"}


def test_killed_between_marker_and_event(reference: Reference, prepared_site: Path, tmp_path: Path) -> None:
    words = arguments(prepared_site, tmp_path / "run")
    with pytest.raises(ValueError, match="injected"):
        train_rank(0, 1, words, [("save:marker_written", 10, 0, "raise")])
    assert train_rank(0, 1, words, []) == (0, "")
    record = audit_run(tmp_path / "run", METHOD, reference)
    errors = {finding.id for finding in record.findings if finding.severity == "error"}
    assert errors == EXPECTED
