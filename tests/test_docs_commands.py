"""README and docs: every command and option exists, both languages say the same, nothing is left out.

What can be run cheaply is run: the quick start, on the tiny protocol.
"""

import contextlib
import importlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from nexttransformer import cli
from nexttransformer.site_config import site_keys

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
    "launch/smoke_all.sh": {"--site-config", "--output", "--micro-batch", "--protocol", "--help"},
    "launch/train.sh": "train",
    "launch/slurm.sbatch": "train",
    "launch/node.sh": "train",
}
PASSES_ANY = {"launch/test.sh", "launch/deepspeed.sh", ".ci/run"}
# English page -> the same page in Chinese.
PAIRS = {page: ROOT / "docs/zh" / page.name for page in sorted((ROOT / "docs/en").glob("*.md"))}
PAIRS[ROOT / "README.md"] = ROOT / "README.zh.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")


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
        if re.fullmatch(r"configs/[\w/]+\.json|launch/[\w.]+", word) and not (ROOT / word).is_file()
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


def shape(page: Path) -> dict[str, list[object]]:
    """Returns what must be the same in both languages."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = (target.replace("docs/zh/", "docs/en/") for target in LINK.findall(prose))
    return {
        "commands": [commands(block) for block in FENCE.findall(text)],
        "languages of blocks": re.findall(r"^```(\w*)\n.*?^```$", text, re.MULTILINE | re.DOTALL),
        "headings": [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)],
        "rows of tables": [line.count("|") for line in prose.splitlines() if line.startswith("|")],
        "list items": [1 for line in prose.splitlines() if line.startswith("- ")],
        "links": [re.sub(r"^README(\.zh)?\.md$", "README", target).partition("#")[0] for target in targets],
    }


@pytest.mark.parametrize("page", PAIRS, ids=lambda page: page.stem)
def test_both_languages_say_the_same(page: Path) -> None:
    assert PAIRS[page].is_file(), f"{PAIRS[page].relative_to(ROOT)} is missing"
    english, chinese = shape(page), shape(PAIRS[page])
    for what, found in english.items():
        assert chinese[what] == found, what


def test_no_page_exists_in_chinese_only() -> None:
    assert sorted((ROOT / "docs/zh").glob("*.md")) == sorted(PAIRS[page] for page in PAIRS if page.name != "README.md")


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("training_guide", "train"),
        ("training_guide", "evaluate"),
        ("data", "prepare_data"),
        ("installation", "doctor"),
    ],
)
def test_every_option_is_documented(page: str, command: str) -> None:
    text = (ROOT / f"docs/en/{page}.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(--[a-z-]+)", text, re.MULTILINE)
    assert options(command) - {"--help"} <= set(documented)


def test_every_key_of_the_site_file_is_documented() -> None:
    text = (ROOT / "docs/en/installation.md").read_text(encoding="utf-8")
    assert set(site_keys()) <= set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def test_every_registered_method_is_in_the_readme() -> None:
    rows = re.findall(r"^\| (\w+) \| (`.*`) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = {(family, method) for family, methods in rows for method in re.findall(r"`(\w+)`", methods)}
    assert listed == {(path.parent.name, path.stem) for path in (ROOT / "configs").glob("*/*.json")}


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


def documented(page: str, command: str) -> list[list[str]]:
    """Returns the arguments of each documented call of a command that runs on one machine, in order."""
    found = []
    for block in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        for words in commands(block):
            module = f"nexttransformer.{command}"
            if words[0] == "launch/train.sh" and command == "train":
                found.append(words[1:])
            elif words[0] == "python" and module in words:
                found.append(words[words.index(module) + 1 :])
    return found


def on_tiny_protocol(words: list[str], site: Path) -> list[str]:
    """Returns a documented command line for `test-v1`; everything else stays as it is documented."""
    if "--config" in words:
        words = [word for word in words if word != "--formal"] + ["--protocol", "test-v1"]
    values = {"--micro-batch": "4", "--site-config": str(site)}
    pairs = zip(["", *words], words, strict=False)
    words = [values.get(before, word) for before, word in pairs]
    changed = {"checkpoint_00046875": "checkpoint_00000020", "evidence/audits": "evidence/demo/audits"}
    return [next((word.replace(old, changed[old]) for old in changed if old in word), word) for word in words]


# About 30 s of one core; a busy machine may take many times that.
@pytest.mark.timeout(900)
def test_the_quick_start_runs(prepared_site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smoke run, whole run, evaluation, audit, export and report, with the documented words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEXTTRANSFORMER_SITE_CONFIG", str(prepared_site))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    page = "docs/en/quick_start.md"

    def run(command: str, words: list[str]) -> int:
        return importlib.import_module(f"nexttransformer.{command}").main(on_tiny_protocol(words, prepared_site))

    smoke, whole = documented(page, "train")
    assert run("train", smoke) == 0
    assert run("train", whole) == 0
    assert run("train", whole) == 0, "repeating a finished run is safe"
    (evaluation,) = documented(page, "evaluate")
    assert run("evaluate", evaluation) == 0
    (audit,) = documented(page, "audit_run")
    assert run("audit_run", [*audit, "--protocol", "test-v1"]) == 0
    (export,) = documented(page, "export_run")
    assert run("export_run", export) == 0
    single, *_ = documented("docs/en/training_guide.md", "report")
    assert run("report", single) == 0
    made = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {
        "runs/dense_full-smoke/evaluations/val_curve_00000002.json",
        "runs/dense_full/evaluations/final.json",
        "runs/dense_full/evaluation.json",
        "runs/dense_full/export/model.safetensors",
        "evidence/demo/runs/dense_full.json",
        "dense_full.html",
    } <= made


def test_the_documented_preparation_runs(prepared_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing again and verifying, as the page says, on data that is there."""
    from nexttransformer import prepare_data

    monkeypatch.setenv("NEXTTRANSFORMER_SITE_CONFIG", str(prepared_site))
    bundled = [words for words in documented("docs/en/data.md", "prepare_data") if "demo-v1" in words]
    assert [words[2:] for words in bundled] == [[], ["--verify"]]
    for words in bundled:
        assert prepare_data.main([word.replace("demo-v1", "test-v1") for word in words]) == 0
