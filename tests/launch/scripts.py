"""Runs the launch scripts in a clean environment, with the Python of the test run as the installed one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"


def environment(**extra: str) -> dict[str, str]:
    """Returns a small environment in which the scripts find this Python and this source tree."""
    base = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(ROOT / "src"),
        "NEXTTRANSFORMER_VENV": sys.prefix,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return {**base, **extra}


def run(*command: str | Path, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with `environment(**extra)` and returns what it printed."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=environment(**extra), timeout=120)
