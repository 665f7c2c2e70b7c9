"""What all launch scripts have in common."""

import os
import re
import subprocess

import pytest

from nexttransformer import __version__
from tests.launch.scripts import LAUNCH, ROOT

SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), *sorted(LAUNCH.glob("*.sbatch")), ROOT / ".ci/run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_is_executable_unless_sourced(script: "os.PathLike[str]") -> None:
    subprocess.run(["bash", "-n", os.fspath(script)], check=True)
    assert os.access(script, os.X_OK) == (os.fspath(script).rpartition("/")[2] != "env.sh")


def test_citation_names_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [__version__]
