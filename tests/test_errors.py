import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nexttransformer.errors import run_command


def exit_code(action: Callable[[], object]) -> object:
    with pytest.raises(SystemExit) as caught:
        run_command(lambda argv: int(bool(action())))
    return caught.value.code


def test_a_path_the_system_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert exit_code((tmp_path / ("x" * 5000)).read_bytes) == 2
    line = capsys.readouterr().err
    assert "File name too long" in line and len(line) < 350 and line.count("\n") == 1
    assert exit_code((tmp_path / "file" / "below").read_bytes) == 2
    expected = f"{tmp_path}/file/below: cannot be used: Not a directory. "
    assert capsys.readouterr().err.startswith(expected)
    assert exit_code(tmp_path.read_bytes) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_a_circle_of_links_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert exit_code((tmp_path / "loop").read_bytes) == 2
    assert exit_code(lambda: (tmp_path / "loop").resolve(strict=True)) == 2
    assert [str(tmp_path / "loop") in line for line in capsys.readouterr().err.splitlines()] == [True, True]


def test_other_system_errors_are_our_bugs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_command(lambda argv: len((tmp_path / "gone").read_bytes()))
    with pytest.raises(OSError, match="Bad file"):
        run_command(lambda argv: __import__("os").close(987_654))


def unread(*words: str, is_unbuffered: bool = False) -> tuple[int, str]:
    """Returns exit code and stderr of Python where the reader of its output has left."""
    reader, writer = os.pipe()
    os.close(reader)
    variables = {**os.environ, "PYTHONUNBUFFERED": "1" if is_unbuffered else ""}
    result = subprocess.run([sys.executable, *words], stdout=writer, stderr=subprocess.PIPE, text=True, env=variables)
    os.close(writer)
    return result.returncode, result.stderr


def program(body: str) -> tuple[str, str]:
    return "-c", f"import nexttransformer.errors as e\ndef main(argv):\n    {body}\ne.run_command(main)"


@pytest.mark.parametrize("is_unbuffered", [False, True])
def test_an_output_that_nobody_reads_is_no_error(is_unbuffered: bool) -> None:
    assert unread("-m", "nexttransformer", "--version", is_unbuffered=is_unbuffered) == (141, "")
    # rich would end it with 1, the code of a judgement.
    by_rich = program("from rich.console import Console; Console().print('found'); return 0")
    assert unread(*by_rich, is_unbuffered=is_unbuffered) == (141, "")


def test_help_that_nobody_reads_is_no_error() -> None:
    assert unread("-m", "nexttransformer", "check_method", "--help") == (141, "")


def test_an_error_is_told_though_nobody_reads_the_output() -> None:
    assert unread(*program("print('some'); raise e.RunFailure('update 3: the loss is nan')")) == (
        141,
        "update 3: the loss is nan\n",
    )
    code, text = unread(*program("print('some'); return len(argv)"))
    assert code != 141 and "TypeError: object of type 'NoneType' has no len()" in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is always full")
@pytest.mark.parametrize("body", ["print('some'); return 0", "print('some', flush=True); return 0"])
def test_an_output_that_cannot_be_written_is_one_line(body: str) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run([sys.executable, *program(body)], stdout=full, stderr=subprocess.PIPE, text=True)
    expected = "standard output: cannot be written: No space left on device. Send it elsewhere.\n"
    assert (result.returncode, result.stderr) == (2, expected)


def test_another_full_disk_is_not_the_output() -> None:
    _, body = program("raise OSError(28, 'No space left on device')")
    result = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True)
    assert result.returncode == 1 and "OSError: [Errno 28]" in result.stderr


def test_a_closed_output_is_no_error() -> None:
    command = f"{sys.executable} -m nexttransformer --version >&-"
    result = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_connection_that_breaks_is_our_bug() -> None:
    code = "import nexttransformer.errors as e\ndef main(argv): raise BrokenPipeError(32, 'gone')\ne.run_command(main)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1 and "BrokenPipeError: [Errno 32] gone" in result.stderr
