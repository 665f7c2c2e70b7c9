import shutil
import sys
from pathlib import Path

import pytest

from tests.launch.scripts import LAUNCH, run

SHELLS = [
    "bash",
    pytest.param("zsh", marks=pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")),
]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "a folder"
    folder.mkdir()
    path = folder / "site.local.json"
    path.write_text('{"data_root": "data", "cache_root": "cache"}')
    return path


@pytest.mark.parametrize("shell", SHELLS)
def test_exports_under_strict_options_from_any_folder(shell: str, site: Path, tmp_path: Path) -> None:
    script = f"""
    set -eu
    before=$(set +o; alias)
    source "{LAUNCH}/env.sh" --site-config "{site}"
    source "{LAUNCH}/env.sh" --site-config="{site}"
    [ "$before" = "$(set +o; alias)" ] || echo "options changed"
    typeset -f | grep _nexttransformer || true
    echo "$(command -v python3)"
    echo "$NEXTTRANSFORMER_SITE_CONFIG"
    echo "$TORCHINDUCTOR_CACHE_DIR $TRITON_CACHE_DIR"
    echo "$FLA_DISABLE_BACKEND_DISPATCH $TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    printf '%s\\n' "$PATH" | tr ':' '\\n' | grep -cx "{sys.prefix}/bin"
    """
    result = run(shell, "-c", script, cwd=tmp_path)
    cache = site.parent / "cache"
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        f"{sys.prefix}/bin/python3",
        str(site),
        f"{cache}/inductor {cache}/triton",
        "1 600",
        "1",
    ]


@pytest.mark.parametrize("shell", SHELLS)
def test_an_error_is_one_line_and_never_ends_the_shell(shell: str, site: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"data_rot": "data"}')
    attempts = {
        f"--site-config {bad}": "unknown key 'data_rot'. Did you mean 'data_root'?",
        "--site-config none.json": "none.json: no such site file",
        "--site-config": "--site-config needs a file name.",
        "--sight-config x": "unknown argument '--sight-config': expected --site-config FILE.",
        "": "site.local.json is not in",
    }
    for arguments, message in attempts.items():
        script = f'set -u; before=$PATH; source "{LAUNCH}/env.sh" {arguments}; echo "code $?"; [ "$PATH" = "$before" ]'
        result = run(shell, "-c", script, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout == "code 2\n"
        lines = [line for line in result.stderr.splitlines() if "missing key" not in line]
        assert len(lines) == 1 and message in lines[0], result.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_the_site_of_the_current_folder_and_relative_environment(shell: str, site: Path) -> None:
    folder = Path(sys.prefix)
    (site.parent / "environment").symlink_to(folder)
    script = f'set -eu; source "{LAUNCH}/env.sh"; echo "$NEXTTRANSFORMER_SITE_CONFIG"; echo "$VIRTUAL_ENV"'
    result = run(shell, "-c", script, cwd=site.parent, NEXTTRANSFORMER_VENV="environment")
    assert result.stdout.splitlines() == [str(site), str(site.parent / "environment")], result.stderr


def test_missing_environment_names_the_install_command(site: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    for venv in (tmp_path / "none", empty):
        (empty / "bin").mkdir(parents=True, exist_ok=True)
        (empty / "bin/python").write_text("#!/bin/sh\nexit 1\n")
        (empty / "bin/python").chmod(0o755)
        script = f'source "{LAUNCH}/env.sh" --site-config "{site}"; echo "code $?"'
        result = run("bash", "-c", script, NEXTTRANSFORMER_VENV=str(venv))
        assert result.stdout == "code 2\n"
        assert len(result.stderr.splitlines()) == 1 and "launch/install.sh --cpu (or --gpu)" in result.stderr


def test_running_it_instead_of_sourcing_is_refused() -> None:
    result = run("bash", LAUNCH / "env.sh")
    assert result.returncode == 2
    assert "is sourced, not run: source" in result.stderr
