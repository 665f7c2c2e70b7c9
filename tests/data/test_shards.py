"""Shards: order, validation choice, and refusals that name the file."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nexttransformer.data.shards import folder_source, read_row_group, row_group_documents, shard_name
from nexttransformer.errors import DataError


def touch(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


@pytest.mark.parametrize("names", [[3, 1, 0, 2], [2, 3, 0, 1], [0, 1, 2, 3]])
def test_order_is_by_number_whatever_the_files_were_made_in(tmp_path: Path, names: list[int]) -> None:
    source = folder_source(touch(tmp_path, [shard_name(index) for index in names] + ["notes.parquet", "a.tsv"]))
    assert source.training == tuple(shard_name(index) for index in range(3))
    assert source.validation == (shard_name(3),)


def test_numbers_of_different_width_are_ordered_as_numbers(tmp_path: Path) -> None:
    source = folder_source(touch(tmp_path, ["shard_10.parquet", "shard_9.parquet", "shard_2.parquet"]))
    assert source.training + source.validation == ("shard_2.parquet", "shard_9.parquet", "shard_10.parquet")


def test_any_parquet_names_work_without_shards(tmp_path: Path) -> None:
    source = folder_source(touch(tmp_path, ["b.parquet", "c.parquet", "a.parquet"]))
    assert (source.training, source.validation) == (("a.parquet", "b.parquet"), ("c.parquet",))


def test_a_copy_of_climbmix_validates_with_its_last_two(tmp_path: Path) -> None:
    folder = touch(tmp_path, [shard_name(index) for index in (0, 1, 6541, 6542)])
    source = folder_source(folder)
    assert (source.training, source.validation) == (
        (shard_name(0), shard_name(1)),
        (shard_name(6541), shard_name(6542)),
    )
    (folder / shard_name(0)).unlink()
    with pytest.raises(DataError, match="lacks shard_00000.parquet"):
        folder_source(folder)


def test_too_few_shards_and_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 parquet shard.*at least 2"):
        folder_source(tmp_path)
    with pytest.raises(DataError, match=r"1 parquet shard.*at least 2"):
        folder_source(touch(tmp_path, ["shard_00000.parquet"]))
    with pytest.raises(DataError, match="no such folder"):
        folder_source(tmp_path / "absent")


def test_wrong_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["x"], "id": [1]}), path)
    with pytest.raises(DataError, match=r"a.parquet: no column 'text': it has content, id"):
        row_group_documents(path)
    pq.write_table(pa.table({"text": [1, 2]}), path)
    with pytest.raises(DataError, match="has type int64: expected string"):
        row_group_documents(path)
    pq.write_table(pa.table({"text": ["x", None]}), path)
    with pytest.raises(DataError, match="row group 0, row 1: 'text' is null"):
        read_row_group(path, 0)
    with pytest.raises(DataError, match="absent.parquet: cannot be read"):
        row_group_documents(tmp_path / "absent.parquet")


def test_a_shard_cut_by_100_bytes_is_named(shard_folder: Path) -> None:
    path = shard_folder / shard_name(1)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="shard_00001.parquet: damaged or cut short"):
        row_group_documents(path)


def test_damaged_pages_are_named(shard_folder: Path) -> None:
    path = shard_folder / shard_name(1)
    content = bytearray(path.read_bytes())
    content[40:400] = bytes(360)
    path.write_bytes(content)
    with pytest.raises(DataError, match="shard_00001.parquet: damaged or cut short"):
        for group in range(len(row_group_documents(path))):
            read_row_group(path, group)
