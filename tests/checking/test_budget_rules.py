"""Tracks by B3 and B4, and the references of section 2.3 of the methods' specification."""

import dataclasses

import pytest

from nexttransformer.checking.budget_rules import find_track
from nexttransformer.checking.structure import measure_method
from nexttransformer.checking.table import markdown_table, sorted_reports, text_table, to_json
from nexttransformer.config import method_files, resolve_method
from nexttransformer.models.budget import Budget, reference_budget
from nexttransformer.protocol import FORMAL_V1, PROTOCOLS, get_protocol


def reference(**changes: int) -> Budget:
    return dataclasses.replace(reference_budget(FORMAL_V1), **changes)


def test_reference_values():
    budget = reference()
    assert budget.macs_per_token == 773_886_168
    assert budget.training_flops_per_token == 4_643_317_008
    assert (budget.num_matmul, budget.num_lookup) == (701_499_096, 654_311_424)
    assert budget.num_parameters == 1_355_810_568


@pytest.mark.parametrize(
    ("changes", "name", "rules"),
    [
        ({}, "main", []),
        ({"num_matmul": 631_400_000}, "main", []),
        ({"num_matmul": 631_300_000}, "loop/shared", ["B4"]),
        ({"num_matmul": 771_600_000}, "main", []),
        ({"num_matmul": 771_700_000}, "sparse", ["B4"]),
        ({"num_lookup": 654_960_000}, "main", []),
        ({"num_lookup": 654_970_000}, "memory", ["B3"]),
        ({"num_lookup": 0}, "main", []),
        ({"num_lookup": 905_969_664, "num_matmul": 531_600_000}, "loop/shared + memory", ["B4", "B3"]),
    ],
)
def test_tracks(changes, name, rules):
    track = find_track(reference(**changes), FORMAL_V1)
    assert (track.name, [finding.rule for finding in track.notes]) == (name, rules)
    assert not any(finding.is_refusal for finding in track.notes)
    assert all("Ranked in track" in finding.message for finding in track.notes)


@pytest.mark.parametrize("protocol_id", sorted(set(PROTOCOLS) - {"formal-v1"}))
def test_derived_sizes_keep_the_budget_under_every_protocol(protocol_id):
    protocol = get_protocol(protocol_id)
    for method, path in method_files().items():
        report = measure_method(resolve_method(path, protocol), protocol)
        assert report.is_passed, (method, [str(finding) for finding in report.findings])
        assert report.deviation is not None and abs(report.deviation) <= protocol.budget_tolerance


def test_a_changed_fixed_size_is_refused():
    config = resolve_method(method_files()["dense_full"], FORMAL_V1).model_copy(update={"qk_gain": 1.3})
    (finding,) = measure_method(config, FORMAL_V1).findings
    assert str(finding) == "B2: qk_gain is 1.3, formal-v1 fixes 1.2. Restore it."


def test_tables_and_json():
    reports = sorted_reports(
        [measure_method(resolve_method(method_files()[method], FORMAL_V1), FORMAL_V1) for method in ("gdn", "sssl")]
    )
    header, first, second = text_table(reports).splitlines()
    assert first.split()[:4] == ["sssl", "main", "24", "6144"] and len(header) == len(first) == len(second)
    assert first.split()[4:9] == ["1,384,122,122", "729,810,648", "654,311,424", "4,641,091,344", "-0.05"]
    assert markdown_table(reports).splitlines()[3].startswith("| [`gdn`](../../configs/linear/gdn.json) | main | 23 |")
    record = to_json(reports, FORMAL_V1)["methods"][1]
    assert (record["method"], record["num_parameters"], record["is_passed"]) == ("gdn", 1_411_349_680, True)
    # 23 layers of 786,432 bytes and three convolutions' last three inputs in bfloat16.
    assert record["decode_state_bytes"] == 23 * (786_432 + 3 * 3 * 1536 * 2)
