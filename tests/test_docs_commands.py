"""Every command in a fenced shell block of README and docs exists, and so does every option it is given."""

import contextlib
import importlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from nexttransformer import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(?:bash|sh|shell)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Programs that are not ours; their options are not judged.
FOREIGN = {
    "cd",
    "cp",
    "curl",
    "export",
    "gh",
    "git",
    "kill",
    "ls",
    "mkdir",
    "nohup",
    "pip",
    "scancel",
    "squeue",
    "touch",
    "uv",
}
# Shell scripts of the project: their options, or the command whose options they take.
SCRIPTS = {
    "launch/install.sh": {"--cpu", "--gpu", "--force", "--help"},
    "launch/env.sh": {"--site-config"},
    "launch/demo.sh": set(),
    "launch/train.sh": "train",
    "launch/slurm.sbatch": "train",
}
PASSES_ANY = {"launch/test.sh", "launch/deepspeed.sh", ".ci/run"}


def commands(text: str) -> list[list[str]]:
    """Returns the words of each command line of a shell block, comments and continuations resolved."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [shlex.split(line, comments=True) for line in joined.splitlines()]
    parts: list[list[str]] = []
    for words in lines:
        current: list[str] = []
        for word in words:
            if word in ("&&", "||", ";", "|", "&"):
                parts.append(current)
                current = []
            else:
                current.append(word)
        parts.append(current)
    return [part for part in parts if part]


@cache
def options(command: str) -> frozenset[str]:
    """Returns the long options that a command's help names."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        importlib.import_module(f"nexttransformer.{command}").main(["--help"])
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", output.getvalue()))


@cache
def accelerate_options() -> frozenset[str]:
    launcher = pytest.importorskip("accelerate.commands.launch", reason="accelerate is not installed")
    return frozenset(launcher.launch_command_parser()._option_string_actions)


def option_problems(given: list[str], known: frozenset[str] | set[str], what: str) -> list[str]:
    names = [word.split("=")[0] for word in given if word.startswith("--") and word != "--"]
    return [f"{what} has no option {name}" for name in names if name not in known]


def module_problems(module: str, arguments: list[str]) -> list[str]:
    package, _, name = module.partition(".")
    if package != "nexttransformer":
        return [] if module in ("venv", "pip", "pytest", "http.server") else [f"python -m {module}: unknown module"]
    if name not in cli.commands():
        return [f"{module}: no such command"]
    return option_problems(arguments, options(name), module)


def problems(words: list[str]) -> list[str]:
    """Returns what is wrong with one command."""
    while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
        words = words[1:]
    found = [
        f"{word} does not exist"
        for word in words
        if re.fullmatch(r"configs/[\w/]+\.json", word) and not (ROOT / word).is_file()
    ]
    if not words:
        return found
    program, arguments = words[0], words[1:]
    if program in ("bash", "source", "sbatch", "."):
        # Options before the script belong to the program that runs it.
        position = next((index for index, word in enumerate(arguments) if not word.startswith("-")), None)
        if position is None:
            return [*found, f"{program} without a script"]
        program, arguments = arguments[position], arguments[position + 1 :]
    program = program.removeprefix("./")
    if program in SCRIPTS or program in PASSES_ANY:
        if not (ROOT / program).is_file():
            return [*found, f"{program} does not exist"]
        known = SCRIPTS.get(program)
        if known is not None:
            found += option_problems(arguments, options(known) if isinstance(known, str) else known, program)
        return found
    if program in ("python", "python3") and arguments[:1] == ["-m"]:
        module, arguments = arguments[1], arguments[2:]
        if module == "torch.distributed.run":
            position = arguments.index("-m")
            module, arguments = arguments[position + 1], arguments[position + 2 :]
        return found + module_problems(module, arguments)
    if program == "accelerate" and arguments[:1] == ["launch"]:
        position = arguments.index("--module")
        found += option_problems(arguments[1:position], accelerate_options(), "accelerate launch")
        return found + module_problems(arguments[position + 1], arguments[position + 2 :])
    if program == "nexttransformer":
        return found + (module_problems(f"nexttransformer.{arguments[0]}", arguments[1:]) if arguments else [])
    return found if program in FOREIGN else [*found, f"unknown program {program}"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page(page: Path) -> None:
    wrong = {
        shlex.join(words): found
        for block in FENCE.findall(page.read_text(encoding="utf-8"))
        for words in commands(block)
        if (found := problems(words))
    }
    assert wrong == {}


@pytest.mark.parametrize("page", sorted((ROOT / "docs/en").glob("*.md")), ids=lambda page: page.stem)
def test_both_languages_show_the_same_commands(page: Path) -> None:
    other = ROOT / "docs/zh" / page.name
    assert other.is_file(), f"docs/zh/{page.name} is missing"
    english, chinese = ([commands(block) for block in FENCE.findall(path.read_text("utf-8"))] for path in (page, other))
    assert english == chinese


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_checker_finds_what_is_wrong() -> None:
    text = (
        "NPROC_PER_NODE=1 launch/train.sh --config configs/none/x.json \\\n  --bogus 1   # why\n"
        "python -m nexttransformer.trian && frobnicate\nbash launch/install.sh --tpu\n"
    )
    found = [problem for words in commands(text) for problem in problems(words)]
    assert found == [
        "configs/none/x.json does not exist",
        "launch/train.sh has no option --bogus",
        "nexttransformer.trian: no such command",
        "unknown program frobnicate",
        "launch/install.sh has no option --tpu",
    ]
