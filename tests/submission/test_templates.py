"""Workflow and templates: the gate runs the base branch's code, and people find every rule they judge."""

import importlib
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nexttransformer.audit.rules import HUMAN_RULES

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
GITHUB = Path(__file__).parents[2] / ".github"


def workflow() -> dict[str, Any]:
    value = yaml.safe_load((GITHUB / "workflows/submission.yml").read_text())
    # YAML reads the key `on` as true.
    return {**value, "on": value.get("on", value.get(True))}


def test_no_code_of_the_request_is_run() -> None:
    value = workflow()
    assert list(value["on"]) == ["pull_request_target"]
    assert value["on"]["pull_request_target"]["paths"] == ["evidence/**", "site/**"]
    assert value["permissions"] == {"contents": "read", "pull-requests": "write"}
    steps = value["jobs"]["check"]["steps"]
    checkouts = [step for step in steps if str(step.get("uses", "")).startswith("actions/checkout")]
    assert [step["with"]["ref"] for step in checkouts] == ["${{ github.event.pull_request.base.sha }}"]
    scripts = "\n".join(step.get("run", "") for step in steps)
    assert "${{" not in scripts, "text of a request must not reach a shell"
    assert "checkout" not in scripts and "merge" not in scripts


def test_the_workflow_runs_the_command_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = "\n".join(step.get("run", "") for step in workflow()["jobs"]["check"]["steps"])
    (line,) = [line for line in scripts.splitlines() if "check_submission" in line]
    words = shlex.split(line)
    assert words[1:3] == ["-m", "nexttransformer.check_submission"]
    with pytest.raises(SystemExit):
        importlib.import_module("nexttransformer.check_submission").main(["--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {word for word in words if word.startswith("--")} <= known


def test_the_template_holds_every_rule_for_people() -> None:
    text = (GITHUB / "PULL_REQUEST_TEMPLATE/submission.md").read_text()
    boxes = dict(re.findall(r"^- \[ \] (H\d) (.*)$", text, re.MULTILINE))
    assert boxes == HUMAN_RULES


def test_the_form_of_a_challenge() -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE/challenge.yml").read_text())
    required = [part["id"] for part in form["body"] if part.get("validations", {}).get("required")]
    assert required == ["record", "rule", "evidence", "recomputation"]


def test_git_ignores_no_evidence_and_no_page() -> None:
    root = GITHUB.parent
    if not (root / ".git").exists():
        pytest.skip("not a git work tree")
    names = ["evidence/runs/x.json", "evidence/demo/runs/x.json", "evidence/audits/x.json", "site/data/runs/x.json"]
    result = subprocess.run(["git", "check-ignore", *names], cwd=root, capture_output=True, text=True)
    assert result.stdout.splitlines() == []
