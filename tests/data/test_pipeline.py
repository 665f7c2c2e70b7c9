"""Preparing: same result for any workers, resumable, verified, refusing what is wrong by name."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nexttransformer import jsonio
from nexttransformer.data import build, encoding, published, verify
from nexttransformer.data.loader import RowReader
from nexttransformer.data.manifest import FILE_NAME, Manifest, load_manifest
from nexttransformer.data.pipeline import Request, prepare
from nexttransformer.data.reporting import Reporter
from nexttransformer.data.shards import bundled_source, folder_source, read_row_group, row_group_documents, shard_name
from nexttransformer.data.tokenizer import FILE_NAME as TOKENIZER_FILE_NAME
from nexttransformer.data.tokenizer import Tokenizer
from nexttransformer.errors import DataError
from nexttransformer.protocol import PROTOCOLS, get_protocol

MakeRequest = Callable[..., Request]


def deep(folder: Path, manifest: Manifest, quiet: Reporter) -> list[str]:
    with quiet.bar("verify", unit="bytes") as bar:
        return verify.deep_problems(folder, manifest, source=None, num_threads=2, bar=bar)


def documents_of(manifest: Manifest, split: str) -> set[tuple[str, int]]:
    ranges = manifest.splits[split].documents
    return {
        (manifest.shards[part.shard].name, row) for part in ranges for row in range(part.start, part.stop, part.step)
    }


def test_rows_are_the_planned_documents(make_request: MakeRequest, quiet: Reporter) -> None:
    """Every row, taken apart at BOS, is made of beginnings of the documents its split may read."""
    request = make_request()
    manifest = prepare(request, quiet)
    assert {name: split.rows for name, split in manifest.splits.items()} == {
        "train": 40,
        "val_curve": 6,
        "val_final": 20,
    }
    tokenizer = Tokenizer.load(request.folder / TOKENIZER_FILE_NAME)
    for name, split in manifest.splits.items():
        texts = []
        for shard, row in sorted(documents_of(manifest, name)):
            path = request.source.fetch(shard)
            texts.append([t for g in range(len(row_group_documents(path))) for t in read_row_group(path, g)][row])
        starts = [tokenizer.encode(text) for text in texts]
        rows = RowReader(request.folder, name).read(range(split.rows))
        assert rows.shape == (split.rows, 17)
        for row in rows.tolist():
            assert row[0] == tokenizer.bos_id
            pieces = " ".join(map(str, row)).split(str(tokenizer.bos_id))[1:]
            for piece in pieces:
                ids = [int(text) for text in piece.split()]
                assert any(start[: len(ids)] == ids for start in starts)
        targets = rows[:, 1:]
        assert split.tokens_counted == int((targets != tokenizer.bos_id).sum())
        assert split.bytes == sum(len(tokenizer.decode_bytes([t])) for t in targets.flat if t != tokenizer.bos_id)


def test_splits_share_no_document(make_request: MakeRequest, quiet: Reporter, prepared_test_v1: Path) -> None:
    for manifest in (prepare(make_request(), quiet), load_manifest(prepared_test_v1)):
        train, curve, final = (documents_of(manifest, name) for name in ("train", "val_curve", "val_final"))
        assert train and curve and final
        assert not (train & curve) | (train & final) | (curve & final)
        validation = {shard.name for shard in manifest.shards if shard.split == "validation"}
        assert {name for name, _ in curve | final} == validation
        assert not {name for name, _ in train} & validation
        assert {row % 5 for _, row in curve} == {0}
        assert {row % 5 for _, row in final} == {1, 2, 3, 4}


def test_workers_do_not_change_a_byte(make_request: MakeRequest, quiet: Reporter, tmp_path: Path) -> None:
    one = prepare(make_request(folder=tmp_path / "one", num_workers=1), quiet)
    two = prepare(make_request(folder=tmp_path / "two", num_workers=2), quiet)
    assert one.to_dict() == two.to_dict()
    for path in sorted((tmp_path / "one").rglob("*.*")):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()


def test_files_made_in_another_order_give_the_same_data(
    make_request: MakeRequest, quiet: Reporter, shard_folder: Path, tmp_path: Path
) -> None:
    first = prepare(make_request(), quiet)
    other = tmp_path / "copied"
    other.mkdir()
    for index in (2, 0, 3, 1):
        shutil.copy(shard_folder / shard_name(index), other / shard_name(index))
    (other / "provenance.tsv").write_text("not a shard")
    assert prepare(make_request(source=folder_source(other), folder=tmp_path / "again"), quiet) == first


@pytest.mark.parametrize("moment", ["rows", "tokens"])
def test_interrupted_work_continues(
    make_request: MakeRequest, quiet: Reporter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moment: str
) -> None:
    expected = prepare(make_request(folder=tmp_path / "undisturbed", rows=100_000), quiet)
    request = make_request(rows=100_000)
    encoded: list[str] = []
    original = encoding._encode_row_group

    def encode(task: encoding._Task) -> encoding._Batch:
        if task.group >= 0:
            if moment == "tokens" and task.path.name == shard_name(2) and task.group == 2:
                raise KeyboardInterrupt
            encoded.append(task.path.name)
        return original(task)

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(encoding, "_encode_row_group", encode)
    with monkeypatch.context() as context:
        if moment == "rows":
            context.setattr(build, "write_split", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(request, quiet)
    assert not (request.folder / FILE_NAME).exists()
    finished = {path.stem for path in (request.folder / "work").glob("*.tokens") if not path.name.startswith(".")}
    assert {shard_name(0), shard_name(1)} <= finished
    # One of the kept files is damaged meanwhile: it is made again, the other is used.
    damaged = request.folder / "work" / f"{shard_name(1)}.tokens"
    content = bytearray(damaged.read_bytes())
    content[0] ^= 1
    damaged.write_bytes(content)
    encoded.clear()
    monkeypatch.setattr(encoding, "_encode_row_group", lambda task: (encoded.append(task.path.name), original(task))[1])
    monkeypatch.setattr("nexttransformer.data.tokenizer_training.train_tokenizer", fail)
    assert prepare(request, quiet) == expected
    groups_of_0 = encoded.count(shard_name(0))
    assert groups_of_0 == 1, "a kept shard passes as one empty task"
    assert encoded.count(shard_name(1)) == 4
    assert not (request.folder / "work").exists()


def test_second_run_changes_nothing_and_a_broken_file_is_repaired(
    make_request: MakeRequest, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request()
    first = prepare(request, quiet)
    with monkeypatch.context() as context:
        context.setattr(build.Build, "run", lambda self: pytest.fail("nothing should be built"))
        assert prepare(request, quiet) == first
        # Fewer rows than stored are served by what is there.
        assert prepare(make_request(rows=3), quiet) == first
    path = request.folder / "train" / "rows_00000.u16"
    path.write_bytes(path.read_bytes()[:-100])
    (request.folder / "train" / "rows_00001.u16").write_bytes(b"of an earlier, larger preparation")
    assert prepare(request, quiet) == first
    assert deep(request.folder, first, quiet) == []
    assert sorted(path.name for path in (request.folder / "train").iterdir()) == ["rows_00000.hashes", "rows_00000.u16"]
    (request.folder / FILE_NAME).write_text("{}")
    assert prepare(request, quiet) == first
    # Data made for other constants is made again, in the same folder.
    other = prepare(make_request(protocol=dataclasses.replace(request.protocol, val_final_rows=8)), quiet)
    assert other.splits["val_final"].rows == 8


def test_verify_names_every_damaged_file(make_request: MakeRequest, quiet: Reporter, shard_folder: Path) -> None:
    request = make_request()
    manifest = prepare(request, quiet)
    assert deep(request.folder, manifest, quiet) == []
    flipped = request.folder / "train" / "rows_00000.u16"
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    (request.folder / "val_curve" / "rows_00000.hashes").write_bytes(b"short")
    (request.folder / "val_final" / "rows_00000.u16").unlink()
    (request.folder / "data_order.json").write_text("{}")
    shard = shard_folder / shard_name(0)
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with quiet.bar("verify", unit="bytes") as bar:
        found = verify.deep_problems(request.folder, manifest, source=request.source, num_threads=2, bar=bar)
    named = ("train/rows_00000.u16", "val_curve/rows_00000.hashes", "val_final/rows_00000.u16")
    for name in (*named, "data_order.json", shard_name(0)):
        assert sum(name in problem for problem in found) == 1, (name, found)
    assert len(found) == 5


def test_more_rows_extend_and_repetition_is_only_marked(
    make_request: MakeRequest, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = prepare(make_request(rows=12), quiet)
    assert small.splits["train"].rows == 12
    large = prepare(make_request(rows=44), quiet)
    assert large.splits["train"].rows == 44
    reader = RowReader(make_request().folder, "train")
    assert (reader.hashes(range(12)) == reader.hashes(range(44))[:12]).all()
    monkeypatch.setattr(build.Build, "run", lambda self: pytest.fail("rows need not be built again"))
    repeated = prepare(make_request(rows=44, is_repeated=True), quiet)
    assert repeated.is_repeated
    assert repeated.splits == large.splits
    assert repeated.digest != large.digest
    assert prepare(make_request(rows=44), quiet) == large


def test_less_text_than_wanted_is_kept_and_said(make_request: MakeRequest, capsys: pytest.CaptureFixture[str]) -> None:
    request = make_request(rows=100_000)
    manifest = prepare(request, Reporter())
    train = manifest.splits["train"]
    assert train.is_exhausted
    assert 40 < train.rows < 100_000
    said = capsys.readouterr().out
    assert f"{train.rows:,} training rows of 17 tokens make {train.rows // 4:,} updates" in said
    assert "The source ends before 100,000 rows" in said
    assert "complete, nothing to do" not in said
    prepare(request, Reporter())
    assert "complete, nothing to do" in capsys.readouterr().out


def test_other_source_or_tokenizer_is_refused(
    make_request: MakeRequest, quiet: Reporter, shard_folder: Path, prepared_test_v1: Path
) -> None:
    manifest = prepare(make_request(), quiet)
    with pytest.raises(DataError, match="another tokenizer"):
        prepare(make_request(tokenizer=prepared_test_v1 / TOKENIZER_FILE_NAME), quiet)
    assert prepare(make_request(tokenizer=make_request().folder / TOKENIZER_FILE_NAME), quiet) == manifest
    (shard_folder / shard_name(3)).rename(shard_folder / shard_name(4))
    with pytest.raises(DataError, match="holds data of another source"):
        prepare(make_request(source=folder_source(shard_folder)), quiet)
    assert load_manifest(make_request().folder) == manifest


def test_given_tokenizer_is_checked_and_used(
    make_request: MakeRequest, quiet: Reporter, tmp_path: Path, prepared_test_v1: Path
) -> None:
    first = prepare(make_request(), quiet)
    path = make_request().folder / TOKENIZER_FILE_NAME
    assert prepare(make_request(folder=tmp_path / "given", tokenizer=path), quiet) == first
    with pytest.raises(DataError, match="has 512 ids: expected 300"):
        prepare(make_request(folder=tmp_path / "b", tokenizer=prepared_test_v1 / TOKENIZER_FILE_NAME), quiet)


def test_damaged_shard_and_unfilled_split_are_named(make_request: MakeRequest, quiet: Reporter, tmp_path: Path) -> None:
    protocol = dataclasses.replace(make_request().protocol, context_tokens=40_000)
    with pytest.raises(DataError, match="fill no row of 40,001 tokens"):
        prepare(make_request(protocol=protocol, folder=tmp_path / "long"), quiet)
    path = make_request().source.fetch(shard_name(3))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="shard_00003.parquet: damaged or cut short"):
        prepare(make_request(), quiet)


def test_two_preparations_at_once_are_refused(make_request: MakeRequest, quiet: Reporter) -> None:
    from nexttransformer.data import pipeline

    request = make_request()
    request.folder.mkdir()
    with pipeline._lock(request.folder, quiet), pytest.raises(DataError, match="another prepare_data"):
        prepare(request, quiet)


def test_full_disk_is_refused_early(
    make_request: MakeRequest, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # pyright: ignore
    with pytest.raises(DataError, match="0.0 GB free"):
        prepare(make_request(), quiet)


def test_published_digests_are_compared(
    make_request: MakeRequest, quiet: Reporter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(published, "PUBLISHED_FOLDER", tmp_path / "protocols")
    monkeypatch.setattr("nexttransformer.protocol.PUBLISHED_FOLDER", tmp_path / "protocols")
    source = dataclasses.replace(make_request().source, kind="bundled")
    request = make_request(source=source, is_published_checked=False)
    manifest = prepare(request, quiet)
    target = published.publish(manifest, request.protocol, folder=request.folder)
    assert request.protocol.published() == published.published_values(manifest, request.protocol)
    order = jsonio.read_json(target / "data_order.json")
    assert jsonio.digest(order) == request.protocol.published()["data_order"]
    checked = dataclasses.replace(request, is_published_checked=True)
    assert prepare(checked, quiet) == manifest

    value = request.protocol.published()
    value["val_final"]["bytes"] += 1
    jsonio.write_json_atomic(target / "published.json", value)
    with pytest.raises(DataError, match="val_final differs from the published one"):
        prepare(checked, quiet)
    # Other data than the protocol's own may differ, and is never ranked.
    assert prepare(dataclasses.replace(checked, rows=4), quiet) == manifest
    value["tokenizer"] = "0" * 64
    jsonio.write_json_atomic(target / "published.json", value)
    with pytest.raises(DataError, match="tokenizer digest"):
        prepare(dataclasses.replace(checked, folder=tmp_path / "new"), quiet)
    assert not (tmp_path / "new" / FILE_NAME).exists()


def test_only_whole_protocol_data_is_published(make_request: MakeRequest, quiet: Reporter) -> None:
    manifest = prepare(make_request(rows=8, is_repeated=True), quiet)
    with pytest.raises(DataError) as error:
        published.publish(manifest, make_request().protocol, folder=make_request().folder)
    for part in ("rows repeat", "--source", "train has 8 rows: expected 40"):
        assert part in str(error.value)


@pytest.mark.parametrize("protocol_id", ["demo-v1", "test-v1"])
def test_shipped_digests(protocol_id: str) -> None:
    protocol = PROTOCOLS[protocol_id]
    value = protocol.published()
    assert value["protocol"] == protocol_id
    assert value["val_curve"]["rows"] == protocol.val_curve_rows
    assert value["val_final"]["rows"] == protocol.val_final_rows
    path = published.PUBLISHED_FOLDER / protocol_id / "data_order.json"
    assert jsonio.digest(jsonio.read_json(path)) == value["data_order"]
    assert sorted(published.load_data_order(path)) == protocol.bpb_updates()


def test_demo_v1_prepares_to_its_published_digests(tmp_path: Path, quiet: Reporter) -> None:
    protocol = get_protocol("demo-v1")
    manifest = prepare(Request(protocol=protocol, folder=tmp_path / "demo-v1", source=bundled_source()), quiet)
    assert published.differences(manifest, protocol) == []
    assert manifest.splits["train"].rows == 2240
    assert not manifest.splits["train"].is_exhausted


def test_repeated_data_order_of_a_long_run_wraps() -> None:
    protocol = dataclasses.replace(get_protocol("test-v1"), id="x", num_updates=10, global_batch_rows=4)
    hashes = np.arange(1, 4, dtype=np.uint64)
    assert [u for u, _ in published.data_order(hashes, protocol, is_repeated=True)["chain"]] == [0, 5, 10]
    assert [u for u, _ in published.data_order(hashes, protocol, is_repeated=False)["chain"]] == [0]
    text = json.dumps(published.data_order(hashes, protocol, is_repeated=True))
    assert json.loads(text)["global_batch_rows"] == 4
