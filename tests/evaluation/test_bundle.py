"""Bundles: every damage is named, archives equal folders, the excerpt is what the protocols name."""

import gzip
import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from nexttransformer.errors import DataError
from nexttransformer.evaluation.bundle import EXCERPT_FOLDER, load_bundle
from nexttransformer.evaluation.core_result import NUM_TASKS
from nexttransformer.protocol import BUNDLE_TASKS_DIGESTS, EXCERPT_BUNDLE

DIGEST = BUNDLE_TASKS_DIGESTS[EXCERPT_BUNDLE]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXCERPT_FOLDER, tmp_path / "bundle"))


def test_the_excerpt_has_all_labels_and_enough_rows() -> None:
    bundle = load_bundle(EXCERPT_FOLDER, DIGEST)
    assert len({task.label for task in bundle.tasks}) == NUM_TASKS
    assert all(len(bundle.rows[task.file]) == task.num_rows >= 12 for task in bundle.tasks)
    assert bundle.is_excerpt
    assert sum(file.stat().st_size for file in EXCERPT_FOLDER.iterdir()) < 300_000


def test_excerpt_files_are_reproducible_gzip() -> None:
    for file in EXCERPT_FOLDER.glob("*.gz"):
        # No name, no time: bytes 4 to 7 of a gzip header are the time, bit 3 of byte 3 says that a name follows.
        assert file.read_bytes()[3:8] == bytes(5), file.name


def rewrite(path: Path, change) -> None:
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.replace(b"a", b"b", 1), "copa.jsonl.gz .*SHA-256 of the unpacked rows"),
        (lambda content: content.split(b"\n", 1)[1], "copa.jsonl.gz .*11 rows, expected 12"),
        (lambda content: content[:5] + b" " + content[5:], "copa.jsonl.gz .*bytes unpacked, expected"),
    ],
)
def test_changed_rows_are_named(folder: Path, change, message: str) -> None:
    rewrite(folder / "copa.jsonl.gz", change)
    with pytest.raises(DataError, match=message):
        load_bundle(folder, DIGEST)


def test_all_problems_are_named_together(folder: Path) -> None:
    (folder / "copa.jsonl.gz").unlink()
    (folder / "boolq.jsonl.gz").write_bytes((folder / "boolq.jsonl.gz").read_bytes()[:100])
    with pytest.raises(DataError) as caught:
        load_bundle(folder, DIGEST)
    lines = str(caught.value).split("\n")
    assert len(lines) == 2
    assert any("copa.jsonl.gz" in line and "missing" in line for line in lines)
    assert any("boolq.jsonl.gz" in line and "damaged gzip" in line for line in lines)


def test_another_listing_is_refused(folder: Path) -> None:
    listing = json.loads((folder / "tasks.json").read_text())
    listing["tasks"][20]["random_baseline"] = 50.0
    (folder / "tasks.json").write_text(json.dumps(listing))
    with pytest.raises(DataError, match="another CORE bundle"):
        load_bundle(folder, DIGEST)


@pytest.mark.parametrize("name", ["bundle.zip", "bundle.tar.gz"])
@pytest.mark.parametrize("root", ["", "inner/core/"])
def test_archives_equal_folders(folder: Path, tmp_path: Path, name: str, root: str) -> None:
    archive = tmp_path / name
    if name.endswith(".zip"):
        with zipfile.ZipFile(archive, "w") as packed:
            for file in folder.iterdir():
                packed.write(file, root + file.name)
    else:
        with tarfile.open(archive, "w:gz") as packed:
            for file in folder.iterdir():
                packed.add(file, root + file.name)
    assert load_bundle(archive, DIGEST) == load_bundle(folder, DIGEST)


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not there"):
        load_bundle(tmp_path / "nowhere", DIGEST)
    with pytest.raises(DataError, match="no tasks.json"):
        load_bundle(tmp_path, DIGEST)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="expected a folder or an archive"):
        load_bundle(tmp_path / "a.txt", DIGEST)
    (tmp_path / "a.zip").write_text("x")
    with pytest.raises(DataError, match="cannot be read"):
        load_bundle(tmp_path / "a.zip", DIGEST)
