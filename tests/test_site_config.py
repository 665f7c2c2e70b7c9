import json
import subprocess
import sys
from pathlib import Path

import pytest

from nexttransformer import site_config
from nexttransformer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


def write(folder: Path, **values: object) -> Path:
    path = folder / "site.json"
    path.write_text(json.dumps(values))
    return path


def test_example_is_valid_and_documents_every_key() -> None:
    example = json.loads((ROOT / "site.example.json").read_text())
    site = site_config.load_site_config(ROOT / "site.example.json")
    assert site.data_root == ROOT / "data_local"
    assert sorted(example["_about"]) == site_config.site_keys()
    assert sorted(key for key in example if key != "_about") == site_config.site_keys()


def test_paths_are_relative_to_the_file_and_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("DISK", "/disk1")
    path = write(tmp_path, data_root="data", cache_root="~/cache", scratch_root="${DISK}/scratch", tokenizer="$DISK/t")
    site = site_config.load_site_config(path)
    assert site.data_folder("formal-v1") == tmp_path / "data/formal-v1"
    assert site.cache_root == Path("/home/ada/cache")
    assert site.scratch_root == Path("/disk1/scratch")
    assert site.tokenizer == Path("/disk1/t")
    assert (site.core_bundle, site.trackers, site.tracker_project) == (None, [], "nexttransformer")


def test_all_problems_of_a_file_together(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        data_rot="x",
        tokenizer=5,
        cache_root="$NO_SUCH_NAME/x",
        scratch_root=None,
        trackers=["wandbb"],
        tracker_project="",
        _about={"tokenizr": "?"},
    )
    with pytest.raises(ConfigError) as caught:
        site_config.load_site_config(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 8
    assert all(line.startswith(f"{path}: ") for line in lines)
    text = "\n".join(lines)
    assert "missing key 'data_root'" in text
    assert "unknown key 'data_rot'. Did you mean 'data_root'?" in text
    assert "unknown key 'tokenizr'. Did you mean 'tokenizer'?" in text
    assert "'tokenizer': got 5, expected a path in quotes or null." in text
    assert "$NO_SUCH_NAME is not set" in text
    assert "'scratch_root': got null, expected a path in quotes." in text
    assert "'wandbb'; input should be 'wandb', 'tensorboard' or 'trackio'" in text
    assert "tracker_project" in text


@pytest.mark.parametrize("content", ["[]", "{", '{"data_root": "a", "data_root": "b"}'])
def test_what_is_no_site_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "site.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="site.json: "):
        site_config.load_site_config(path)


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEXTTRANSFORMER_SITE_CONFIG", raising=False)
    with pytest.raises(ConfigError) as caught:
        site_config.load_site_config(None)
    for place in ("--site-config", "NEXTTRANSFORMER_SITE_CONFIG", "site.local.json"):
        assert place in str(caught.value)
    local = tmp_path / "site.local.json"
    local.write_text('{"data_root": "local"}')
    assert site_config.load_site_config(None).data_root == tmp_path / "local"
    variable = write(tmp_path, data_root="variable")
    monkeypatch.setenv("NEXTTRANSFORMER_SITE_CONFIG", str(variable))
    assert site_config.load_site_config(None).data_root == tmp_path / "variable"
    assert site_config.load_site_config(Path("site.local.json")).data_root == tmp_path / "local"
    variable.unlink()
    with pytest.raises(ConfigError, match=r"no such site file \(NEXTTRANSFORMER_SITE_CONFIG\)"):
        site_config.load_site_config(None)


def test_path_problems(tmp_path: Path) -> None:
    path = write(tmp_path, data_root="site.json/x", tokenizer="none", core_bundle="none", cache_root="new/cache")
    lines = site_config.path_problems(site_config.load_site_config(path), "site.json")
    assert len(lines) == 3
    assert [line.split("'")[1] for line in lines] == ["tokenizer", "core_bundle", "data_root"]


def test_paths_the_system_refuses_are_problems(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    path = write(tmp_path, data_root="loop/x", tokenizer="x" * 300, core_bundle="y" * 5000, scratch_root="z" * 300)
    lines = site_config.path_problems(site_config.load_site_config(path), "site.json")
    assert [line.split("'")[1] for line in lines] == ["tokenizer", "core_bundle", "data_root", "scratch_root"]
    assert "leads nowhere" in lines[2] and all("File name too long" in lines[index] for index in (0, 1, 3))
    assert max(map(len, lines)) < 250


def test_paths_that_are_none_come_together(tmp_path: Path) -> None:
    path = write(tmp_path, data_root="a\0b", cache_root="~no_such_user_7/x")
    with pytest.raises(ConfigError) as caught:
        site_config.load_site_config(path)
    first, second = str(caught.value).splitlines()
    assert "'data_root': holds a zero character" in first and "'cache_root': ~no_such_user_7 is no user" in second


def test_shell_exports_survive_hostile_paths(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "$(touch x)" folder'
    folder.mkdir()
    path = write(folder, data_root="data", cache_root="cache")
    output = subprocess.run(
        [sys.executable, "-m", "nexttransformer.site_config", "--shell", str(path)],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT / "src"), "HOME": str(tmp_path)},
    ).stdout  # fmt: skip
    shown = subprocess.run(
        ["bash", "-c", f'{output}printf "%s|%s" "$NEXTTRANSFORMER_SITE_CONFIG" "$TRITON_CACHE_DIR"'],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    ).stdout  # fmt: skip
    assert shown == f"{path}|{folder / 'cache/triton'}"
    assert not (tmp_path / "x").exists()


def test_importing_needs_no_torch() -> None:
    code = "import sys, nexttransformer.site_config, nexttransformer.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")})
