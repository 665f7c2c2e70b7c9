import subprocess
import sys
from pathlib import Path

import pytest

from nexttransformer import __version__, cli
from nexttransformer.errors import ConfigError

SOURCE = Path(__file__).resolve().parents[1] / "src"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nexttransformer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE)})


def test_help_lists_every_command_without_torch() -> None:
    code = "import sys; from nexttransformer import cli; cli.main(['--help']); sys.exit('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE)}
    )
    assert result.returncode == 0
    for name in cli.commands():
        assert f"\n  {name} " in result.stdout


def test_every_command_module_is_listed() -> None:
    """A command is a module of the package whose last line runs `main`; the helpers are none."""
    helpers = {"__main__", "launch", "launch_environment", "launch_node", "provenance", "requeue", "site_config"}
    modules = {
        path.stem for path in (SOURCE / "nexttransformer").glob("*.py") if "\n    run_command(main)" in path.read_text()
    }
    assert modules - helpers == set(cli.commands())


def test_unknown_command_names_the_nearest() -> None:
    result = run("trian")
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["nexttransformer: unknown command 'trian'. Did you mean 'train'?"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"nexttransformer {__version__}\n"


def test_dispatch_passes_arguments_and_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prepare_data.py").write_text("def main(argv):\n    return len(argv)\n")
    monkeypatch.setattr(cli, "commands", lambda: {"prepare_data": ""})
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: __import__(name.rpartition(".")[2]))
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["prepare-data", "--a", "1"]) == 2
    with pytest.raises(ConfigError, match="Did you mean 'prepare_data'"):
        cli.main(["prepare"])
