"""The prepare_data command."""

import json
from pathlib import Path

import pytest

from nexttransformer import prepare_data
from nexttransformer.data.manifest import load_manifest
from nexttransformer.errors import ConfigError, DataError, ProtocolError


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "site.json"
    path.write_text(json.dumps({"data_root": "data"}))
    return path


def run(site: Path, *arguments: str) -> int:
    return prepare_data.main(["--site-config", str(site), "--protocol", "test-v1", "--workers", "1", *arguments])


def test_prepares_repeats_and_verifies(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(site) == 0
    folder = site.parent / "data" / "test-v1"
    assert load_manifest(folder).splits["train"].rows == 160
    assert "prepared. 160 training rows of 129 tokens make 20 updates" in capsys.readouterr().out
    assert run(site) == 0
    assert "complete, nothing to do" in capsys.readouterr().out
    assert run(site, "--verify") == 0
    assert "every byte is as recorded" in capsys.readouterr().out
    path = folder / "val_final" / "rows_00000.u16"
    content = bytearray(path.read_bytes())
    content[7] ^= 4
    path.write_bytes(content)
    assert run(site, "--verify") == 1
    said = capsys.readouterr().out
    assert "val_final/rows_00000.u16: SHA-256 is" in said
    assert "1 problem(s)" in said


def test_mistakes_are_refused(site: Path) -> None:
    with pytest.raises(ConfigError, match="--rows 0: expected a whole number from 1"):
        run(site, "--rows", "0")
    with pytest.raises(ConfigError, match="--workers -1"):
        run(site, "--workers", "-1")
    with pytest.raises(ConfigError, match="nothing to download"):
        run(site, "--download-only")
    with pytest.raises(DataError, match="no prepared data"):
        run(site, "--verify")
    with pytest.raises(DataError, match="no such folder"):
        run(site, "--source", str(site.parent / "absent"))
    with pytest.raises(ProtocolError, match="Did you mean 'demo-v1'"):
        run(site, "--protocol", "demo-v2")
    with pytest.raises(SystemExit) as stop:
        run(site, "--row", "3")
    assert stop.value.code == 2


def test_updates_are_rows_of_the_protocol(site: Path) -> None:
    assert run(site, "--updates", "3") == 0
    assert load_manifest(site.parent / "data" / "test-v1").splits["train"].rows == 24


def test_a_data_root_that_cannot_be_made(site: Path) -> None:
    (site.parent / "data").touch()
    with pytest.raises(DataError, match="data/test-v1: cannot be made: Not a directory. Correct 'data_root'"):
        run(site)
