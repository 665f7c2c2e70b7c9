"""The `nexttransformer` command: finds a sub-command's module and runs its `main`.

Importing this module imports nothing heavy: `nexttransformer --help` answers at once, without torch.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from nexttransformer import __version__
from nexttransformer.errors import EXIT_OK, ConfigError, suggest

# Module name -> what it does, in the order a user meets them.
_SUMMARIES = {
    "doctor": "check environment, GPUs, kernels, data and network; say what to do",
    "prepare_data": "download or read text, make the tokenizer and the packed rows",
    "check_method": "check a method in seconds on a CPU",
    "train": "train a method",
    "evaluate": "BPB and CORE of a checkpoint",
    "generate": "text from a checkpoint or export",
    "report": "one page with curves, table and verdict of one or several runs",
    "audit_run": "judge a finished run",
    "export_run": "write an audited run's record, weights and model card",
    "check_submission": "check the files of a pull request",
    "leaderboard": "build the leaderboard pages from evidence/",
    "bench": "tokens per second, MFU and memory of a config",
}


def commands() -> dict[str, str]:
    """Returns command name -> summary of every command of this version."""
    package = Path(__file__).resolve().parent
    return {name: summary for name, summary in _SUMMARIES.items() if (package / f"{name}.py").is_file()}


def help_text() -> str:
    """Returns what `nexttransformer --help` prints."""
    width = max((len(name) for name in commands()), default=0)
    lines = [f"  {name:<{width}}  {summary}" for name, summary in commands().items()]
    return "\n".join(
        [
            "usage: nexttransformer COMMAND [options]     (the same as python -m nexttransformer.COMMAND)",
            "",
            *lines,
            "",
            "nexttransformer COMMAND --help lists a command's options; nexttransformer --version prints the version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `nexttransformer COMMAND ...`; a dash in the command's name may stand for an underscore.

    Raises:
        ConfigError: if there is no such command; names the nearest one.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_text())
        return EXIT_OK
    if arguments[0] == "--version":
        print(f"nexttransformer {__version__}")
        return EXIT_OK
    name = arguments[0].replace("-", "_")
    if name not in commands():
        raise ConfigError(f"nexttransformer: unknown command '{arguments[0]}'.{suggest(name, commands())}")
    return importlib.import_module(f"nexttransformer.{name}").main(arguments[1:])
