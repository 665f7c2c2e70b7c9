"""Reading rows: by index and by update, over several files, with damage named by file and row."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nexttransformer.data import build, order, rows
from nexttransformer.data.loader import RowReader, TrainingRows
from nexttransformer.data.manifest import load_manifest
from nexttransformer.data.pipeline import Request, prepare
from nexttransformer.data.published import load_data_order
from nexttransformer.data.reporting import Reporter
from nexttransformer.errors import DataError
from nexttransformer.protocol import get_protocol


@pytest.fixture
def copied(prepared_test_v1: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared_test_v1, tmp_path / "test-v1")


def test_rows_of_an_update(prepared_test_v1: Path) -> None:
    protocol = get_protocol("test-v1")
    training = TrainingRows(prepared_test_v1, protocol)
    stored = np.fromfile(prepared_test_v1 / "train" / "rows_00000.u16", dtype="<u2").reshape(160, 129)
    assert training.num_rows == 160
    for update in (0, 7, 19):
        whole = training.rows(update, 0, 8)
        assert whole.dtype == np.uint16
        assert (whole == stored[update * 8 : update * 8 + 8]).all()
        # Any shares of any number of ranks are parts of the same rows.
        for world_size in (1, 2, 3, 5, 8):
            cuts = [8 * rank // world_size for rank in range(world_size + 1)]
            parts = [training.rows(update, a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
            assert (np.concatenate(parts) == whole).all()
    assert (stored[:, 0] == 503).all()


def test_chain_of_all_updates_is_the_published_one(prepared_test_v1: Path) -> None:
    training = TrainingRows(prepared_test_v1, get_protocol("test-v1"))
    chain, expected = order.initial_chain(), load_data_order(prepared_test_v1 / "data_order.json")
    assert sorted(expected) == [0, 5, 10, 15, 20]
    for update in range(20):
        read = training.rows(update, 0, 8)
        assert (training.hashes(update, 0, 8) == order.row_hashes(read)).all()
        chain = order.next_chain(chain, update + 1, order.sum_hashes(order.row_hashes(read)))
        assert expected.get(update + 1, chain) == chain


def test_read_keeps_the_order_asked_for(prepared_test_v1: Path) -> None:
    reader = RowReader(prepared_test_v1, "val_final")
    assert reader.num_rows == 32
    backwards = reader.read([31, 0, 0, 5])
    assert (backwards[1] == backwards[2]).all()
    assert (backwards[0] == reader.read([31])[0]).all()
    assert reader.read([]).shape == (0, 129)
    with pytest.raises(IndexError):
        reader.read([32])
    with pytest.raises(IndexError):
        reader.read([-1])
    with pytest.raises(DataError, match="no split 'val'"):
        RowReader(prepared_test_v1, "val")


def test_a_flipped_byte_is_refused_by_file_and_row(copied: Path) -> None:
    path = copied / "train" / "rows_00000.u16"
    content = bytearray(path.read_bytes())
    content[129 * 2 * 42 + 100] ^= 1
    path.write_bytes(content)
    reader = RowReader(copied, "train")
    reader.read([41, 43])
    with pytest.raises(DataError, match=r"train/rows_00000.u16: row 42 \(row 42 of train\)"):
        reader.read([41, 42, 43])


def test_short_missing_and_replaced_files_are_named(copied: Path) -> None:
    path = copied / "val_curve" / "rows_00000.u16"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="val_curve/rows_00000.u16: 4,028 bytes: expected 4,128"):
        RowReader(copied, "val_curve").read([0])
    (copied / "val_final" / "rows_00000.u16").unlink()
    with pytest.raises(DataError, match="val_final/rows_00000.u16: missing"):
        RowReader(copied, "val_final").read([0])
    hashes = copied / "train" / "rows_00000.hashes"
    hashes.write_bytes(bytes(len(hashes.read_bytes())))
    with pytest.raises(DataError, match="train/rows_00000.hashes: its SHA-256"):
        RowReader(copied, "train").hashes([0])


def test_too_little_data_is_refused_with_figures(prepared_test_v1: Path) -> None:
    training = TrainingRows(prepared_test_v1, get_protocol("test-v1"))
    training.check_enough(20)
    with pytest.raises(DataError, match=r"21 updates x 8 rows need 168 rows, 160 are stored \(20 updates\)"):
        training.check_enough(21)


def test_other_protocol_is_refused(prepared_test_v1: Path) -> None:
    with pytest.raises(DataError, match="prepared for test-v1: expected demo-v1"):
        TrainingRows(prepared_test_v1, get_protocol("demo-v1"))


def test_several_files_and_repetition(
    make_request: Callable[..., Request], quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "ROWS_PER_FILE", 7)
    monkeypatch.setattr(build, "ROWS_PER_FILE", 7)
    request = make_request(rows=17, is_repeated=True)
    manifest = prepare(request, quiet)
    assert [file.rows for file in manifest.splits["train"].files] == [7, 7, 3]
    training = TrainingRows(request.folder, request.protocol)
    stored = training.reader.read(range(17))
    assert (order.row_hashes(stored) == training.reader.hashes(range(17))).all()
    # Row 4u + i of the run is stored row (4u + i) mod 17.
    assert (training.rows(4, 0, 4) == stored[[16, 0, 1, 2]]).all()
    assert (training.hashes(9, 1, 4) == order.row_hashes(stored[[3, 4, 5]])).all()
    training.check_enough(1_000_000)
    assert training.num_epochs(10) == 40 / 17
    sums = [order.sum_hashes(training.hashes(update, 0, 4)) for update in range(10)]
    assert dict(order.chain_values(sums, at=[0, 5, 10])) == load_data_order(request.folder / "data_order.json")
    assert load_manifest(request.folder).is_repeated
