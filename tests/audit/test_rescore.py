"""E5: with --deep a slice of the evaluations is scored again."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from nexttransformer.audit import rescore
from nexttransformer.audit.reference import Reference
from nexttransformer.audit.report import AuditRecord
from tests.audit.conftest import found
from tests.audit.edit import RunCopy
from tests.audit.test_mutations import FINAL, rewrite_weights, set_bpb


@pytest.fixture
def deep(reference: Reference, prepared_data: Path) -> Reference:
    return dataclasses.replace(reference, data_folder=prepared_data, is_deep=True)


def test_the_bpb_slice(
    run: RunCopy, audit: Callable[..., AuditRecord], deep: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescore, "_core", lambda *arguments: iter(()))
    assert audit(run, reference=deep).findings == []
    set_bpb(run, FINAL, "val_final", shift=-0.004)
    run.seal()
    assert audit(run, reference=deep).exit_code == 0
    assert found(audit(run, reference=deep)) == {("E5", "warning")}


@pytest.mark.slow
def test_perturbed_weights(run: RunCopy, audit: Callable[..., AuditRecord], deep: Reference) -> None:
    assert audit(run, reference=deep).findings == []
    rewrite_weights(run, lambda tensors: tensors.update({"lm_head.weight": -tensors["lm_head.weight"]}))
    run.seal()
    record = audit(run, reference=deep)
    assert found(record) == {("E5", "warning")} and len(record.findings) == 2


def test_without_data_it_cannot_be_judged(
    run: RunCopy, audit: Callable[..., AuditRecord], reference: Reference
) -> None:
    record = audit(run, reference=dataclasses.replace(reference, is_deep=True))
    assert found(record) == {("E5", "unjudged")} and record.exit_code == 2
