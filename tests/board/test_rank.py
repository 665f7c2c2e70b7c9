"""Ranks, ties and the ranking by time against hand-computed values."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexttransformer.board.rank import rank_by_bpb, rank_by_time
from nexttransformer.board.records import Record, read_evidence
from nexttransformer.errors import AuditError
from nexttransformer.export.record import Record as RecordFile
from nexttransformer.reporting import noise
from tests.board.synthetic_records import make_record, write_board, write_record


def record(method: str, bpb: float, division: str = "formal", track: str = "main") -> Record:
    protocol = "formal-v1" if division == "formal" else "demo-v1"
    value = make_record(method, bpb=bpb, protocol=protocol, track=track)
    value["digests"]["audit"] = "0" * 64
    return Record(RecordFile.from_json(value, method), b"", b"")


def test_noise_bands_are_the_specified_ones():
    assert round(noise.BPB_BAND, 5) == 6.5e-4
    assert round(noise.CORE_BAND, 4) == 0.0175
    assert noise.is_bpb_tie(0.6672, 0.6671) and not noise.is_bpb_tie(0.6672, 0.6644)


def test_ties_share_rank_ranges_and_need_not_be_transitive():
    # b is within the band of a and c; a and c are apart.
    rows = rank_by_bpb([record("c", 0.6610), record("a", 0.6600), record("b", 0.6605), record("d", 0.6700)])
    assert [(row.record.method, row.best, row.worst, row.ties) for row in rows] == [
        ("a", 1, 2, ("b",)),
        ("b", 1, 3, ("a", "c")),
        ("c", 2, 3, ("b",)),
        ("d", 4, 4, ()),
    ]


def test_difference_to_the_dense_baseline():
    rows = rank_by_bpb([record("dense_full", 0.6672), record("sssl", 0.6671), record("mhc", 0.6617)])
    found = {row.record.method: (round(row.difference or 0, 4), row.is_tie_with_reference) for row in rows}
    assert found == {"dense_full": (0.0, True), "sssl": (-0.0001, True), "mhc": (-0.0055, False)}
    assert [row.difference for row in rank_by_bpb([record("mhc", 0.6617)])] == [None]


def test_demo_results_and_other_tracks():
    rows = rank_by_bpb([record("a", 2.0001, "demo"), record("b", 2.0002, "demo"), record("c", 1.0, "demo", "memory")])
    assert [(row.record.method, row.best, row.worst) for row in rows] == [("a", 1, 1), ("b", 2, 2)]


@given(st.lists(st.floats(0.6, 0.7), max_size=12))
def test_rank_ranges_hold_everywhere(scores: list[float]):
    rows = rank_by_bpb([record(f"m{index}", score) for index, score in enumerate(scores)])
    assert [row.record.bpb for row in rows] == sorted(scores)
    for place, row in enumerate(rows, start=1):
        assert row.best <= place <= row.worst
        for other in rows:
            assert (other.record.method in row.ties) == (row.record.method in other.ties)


def test_ranking_by_time(tmp_path: Path):
    records = read_evidence(write_board(tmp_path)).records["formal"]
    # 1,200,000 tokens/s against 1,000,000 on the same 8 GPUs.
    by_speed = rank_by_time(records, None)
    assert by_speed[0].record.method == "dense_full" and by_speed[0].slowdown == 1.0
    assert by_speed[0].tokens_per_second_per_gpu == 150_000
    assert all(row.slowdown == pytest.approx(1.2) for row in by_speed[1:])
    assert "engram" not in {row.record.method for row in by_speed}
    by_time = rank_by_time(records, 0.02)
    assert by_time[0].record.method == "mhc"
    assert by_time[0].bpb_at_equal_time == pytest.approx(0.6617 + 0.02 * math.log(1.2, 2))


def test_other_gpus_are_not_compared_in_time(tmp_path: Path):
    write_record(tmp_path, make_record("dense_full", bpb=0.6672))
    other = make_record("mhc", bpb=0.6617, family="residual")
    other["training"]["attempts"][0]["gpus"] = {"NVIDIA H100": 8}
    write_record(tmp_path, other)
    mixed = make_record("hc", bpb=0.6644, family="residual")
    mixed["training"]["attempts"].append({**mixed["training"]["attempts"][0], "world_size": 16})
    write_record(tmp_path, mixed)
    rows = {row.record.method: row.slowdown for row in rank_by_time(read_evidence(tmp_path).records["formal"], 0.02)}
    assert rows == {"dense_full": 1.0, "mhc": None}


def test_every_bad_record_is_named_at_once(tmp_path: Path):
    write_record(tmp_path, make_record("dense_full", bpb=0.6672))
    write_record(tmp_path, make_record("refused", bpb=0.66), verdict="refused")
    write_record(tmp_path, make_record("demo", bpb=0.66, protocol="demo-v1") | {"division": "formal"})
    write_record(tmp_path, make_record("negative", bpb=-1.0))
    write_record(tmp_path, {**make_record("other", bpb=0.6), "display_name": None, "family": 3})
    write_record(tmp_path, make_record("alone", bpb=0.6))
    (tmp_path / "audits/alone.json").unlink()
    write_record(tmp_path, make_record("renamed", bpb=0.6)).rename(tmp_path / "runs/moved.json")
    (tmp_path / "audits/renamed.json").rename(tmp_path / "audits/moved.json")
    write_record(tmp_path, make_record("foreign", bpb=0.6), run_id="f" * 16)
    write_record(tmp_path, make_record("edited", bpb=0.6))
    audit = tmp_path / "audits/edited.json"
    audit.write_bytes(audit.read_bytes() + b" ")
    (tmp_path / "runs/broken.json").write_text('{"schema": NaN}')
    (tmp_path / "audits/broken.json").write_text("{}")
    (tmp_path / "wall_clock.json").write_text('{"schema": "nexttransformer.wall_clock/1", "beta_bpb": -0.1}')
    with pytest.raises(AuditError) as caught:
        read_evidence(tmp_path)
    text = str(caught.value)
    for named in (
        "refused.json: 'verdict' is 'refused'",
        "demo.json: division 'formal' under demo-v1",
        "negative.json: results.bpb_final.bpb",
        "other.json: family",
        "other.json: display_name",
        "alone.json: cannot be read",
        "moved.json: 'method' is 'renamed'",
        "foreign.json: 'run_id'",
        "edited.json: is not the file",
        "broken.json: not valid JSON",
        "wall_clock.json: expected",
    ):
        assert named in text
    assert "dense_full" not in text
