"""What `accelerate launch` was asked for, compared with what it started.

Accelerate 1.15.0 divides the number of processes by the number of machines and drops the remainder: 7 over 2
become 6, and the run looks healthy. Only its command line still says 7.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from nexttransformer.launch_environment import option_value


def parent_command() -> list[str]:
    """Returns the command line of the process that started this one; empty where it cannot be read."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [word.decode(errors="replace") for word in words if word]


def launcher_problems(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns one line if `accelerate launch` (its command line as `words`) dropped processes.

    Other launchers start what they are asked for.
    """
    is_accelerate = any(Path(word).name == "accelerate" for word in words[:3]) and "launch" in words[:4]
    world_size = environ.get("WORLD_SIZE", "")
    if not (is_accelerate or "accelerate.commands.launch" in words[:4]) or not world_size.isdigit():
        return []
    stop = next((index for index, word in enumerate(words) if word in ("--module", "-m") and index > 3), len(words))
    own = [word if not word.startswith("--") else _with_underscores(word) for word in words[:stop]]
    file = _read(option_value(own, "--config_file"))
    num_processes = option_value(own, "--num_processes") or _setting(file, "num_processes")
    num_machines = option_value(own, "--num_machines") or _setting(file, "num_machines") or "1"
    if num_processes is None or not num_processes.isdigit() or int(num_processes) == int(world_size):
        return []
    return [
        f"--num_processes {num_processes} over --num_machines {num_machines}: Accelerate started only {world_size} "
        "processes. It counts the processes of all machines together, equally many on each. Give a multiple."
    ]


def _with_underscores(option: str) -> str:
    name, separator, value = option.partition("=")
    return "--" + name.removeprefix("--").replace("-", "_") + separator + value


def _read(path: str | None) -> str:
    try:
        return Path(path).read_text(encoding="utf-8") if path else ""
    except OSError:
        return ""


def _setting(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}:\s*(\d+)\s*$", text, re.MULTILINE)
    return found.group(1) if found else None
