import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from nexttransformer import provenance
from nexttransformer.errors import ConfigError


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main"]
    result = subprocess.run(["git", *identity, "-C", str(root), *arguments], check=True, capture_output=True, text=True)
    return result.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A committed repository with a small package; returns the package's folder."""
    root = tmp_path / "repository"
    package = root / "src/nexttransformer"
    (package / "models").mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    (package / "models/b.py").write_text("b = 2\n")
    (root / "configs").mkdir()
    (root / "configs/m.json").write_text("{}")
    (root / ".gitignore").write_text("__pycache__/\n.install_stamp.json\n")
    git(root.parent, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return package


def test_source_digest_by_hand(package: Path) -> None:
    (package / "__pycache__").mkdir()
    (package / "__pycache__/a.pyc").write_text("cache")
    (package / "configs").mkdir()
    (package / "configs/m.json").write_text("{}")
    hashes = [hashlib.sha256(text).hexdigest() for text in (b"a = 1\n", b"b = 2\n")]
    files = provenance.package_files(package)
    assert files == {"a.py": hashes[0], "models/b.py": hashes[1]}
    canonical = f'[["a.py","{hashes[0]}"],["models/b.py","{hashes[1]}"]]'
    assert provenance.source_digest(files) == hashlib.sha256(canonical.encode()).hexdigest()


def test_parts_digest_is_of_the_named_files_in_any_order() -> None:
    files = [provenance.PACKAGE / "errors.py", provenance.PACKAGE / "jsonio.py"]
    canonical = json.dumps(
        [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files], separators=(",", ":")
    )
    expected = hashlib.sha256(canonical.encode()).hexdigest()
    assert provenance.parts_digest(files) == provenance.parts_digest(reversed(files)) == expected
    with pytest.raises(ValueError):
        provenance.parts_digest([Path(__file__)])


def test_git_commit_and_cleanness(package: Path) -> None:
    root = package.parents[1]
    config = root / "configs/m.json"
    commit = git(root, "rev-parse", "HEAD")
    identity = provenance.code_identity(config, package=package)
    assert (identity.commit, identity.is_clean, identity.dirty_files) == (commit, True, ())

    (root / "notes.txt").write_text("not code")
    (root / "configs/other.json").write_text("{}")
    assert provenance.code_identity(config, package=package).is_clean
    config.write_text('{"changed": 1}')
    assert provenance.code_identity(config, package=package).dirty_files == ("configs/m.json",)
    assert provenance.code_identity(package=package).is_clean
    (package / "models/new.py").write_text("")
    identity = provenance.code_identity(package=package)
    assert (identity.is_clean, identity.dirty_files) == (False, ("src/nexttransformer/models/new.py",))


def test_stamp_stands_in_for_git(package: Path, tmp_path: Path) -> None:
    commit = provenance.write_stamp(package=package).commit
    stamp = json.loads((package / provenance.STAMP_NAME).read_text())
    assert stamp["commit"] == commit and stamp["clean"] is True

    copy = tmp_path / "site-packages/nexttransformer"
    shutil.copytree(package, copy)
    identity = provenance.code_identity(package=copy)
    assert (identity.commit, identity.is_clean) == (commit, True)
    assert identity.source_digest == provenance.code_identity(package=package).source_digest
    # Writing again without git keeps the stamp; a changed file counts as dirty.
    (copy / "a.py").write_text("a = 2\n")
    assert not provenance.write_stamp(package=copy).is_clean
    assert json.loads((copy / provenance.STAMP_NAME).read_text()) == stamp

    (copy / provenance.STAMP_NAME).write_text('{"commit": null}')
    with pytest.raises(ConfigError, match="damaged install stamp"):
        provenance.code_identity(package=copy)
    (copy / provenance.STAMP_NAME).unlink()
    identity = provenance.code_identity(package=copy)
    assert (identity.commit, identity.is_clean) == (None, False)


def test_a_dirty_tree_is_stamped_dirty(package: Path, tmp_path: Path) -> None:
    (package / "a.py").write_text("a = 3\n")
    provenance.write_stamp(package=package)
    shutil.copytree(package, tmp_path / "copy")
    assert not provenance.code_identity(package=tmp_path / "copy").is_clean


def test_another_repository_around_an_installed_package_is_not_its_git(package: Path) -> None:
    installed = package.parents[1] / ".venv/lib/nexttransformer"
    shutil.copytree(package, installed)
    assert provenance.code_identity(package=installed).commit is None
