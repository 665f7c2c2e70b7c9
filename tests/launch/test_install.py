"""launch/install.sh without installing anything, and the pins it installs from."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.scripts import LAUNCH, ROOT, run

PIN = re.compile(r'([a-z0-9][a-z0-9-]*)==([0-9][A-Za-z0-9.]*)( ; python_version (?:>=|<) "3\.11")?')


def pins(kind: str) -> list[tuple[str, str]]:
    """Returns (name with marker, version) of a constraints file."""
    lines = (ROOT / f"constraints/{kind}.txt").read_text().splitlines()
    matches = [(line, PIN.fullmatch(line)) for line in lines if not line.startswith("#")]
    assert [line for line, match in matches if match is None] == []
    return [(match[1] + (match[3] or ""), match[2]) for _, match in matches if match]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_constraints_are_pins_without_addresses(kind: str) -> None:
    names = [name for name, _ in pins(kind)]
    assert len(names) == len(set(names))
    assert "://" not in (ROOT / f"constraints/{kind}.txt").read_text()


def test_gpu_pins_are_the_cpu_pins_and_the_kernel_pair() -> None:
    cpu, gpu = dict(pins("cpu")), dict(pins("gpu"))
    assert {name: gpu.get(name) for name in cpu} == cpu
    assert set(gpu) - set(cpu) == {"triton", "fla-core", "einops"}
    assert gpu["fla-core"] == "0.6.0" and gpu["torch"] == "2.13.0"
    assert tuple(int(part) for part in gpu["triton"].split(".")) >= (3, 7, 1)


def test_every_direct_dependency_is_pinned_inside_its_range() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.findall(r'^\s*"([a-z][A-Za-z0-9_-]*)(?:\[[a-z]+\])?([><=][^"]*)",?$', text, re.MULTILINE)
    declared += re.findall(r'"(fla-core|einops|packaging|accelerate)([><=][^"]*)"', text)
    installed = {name.split(" ; ")[0]: version for name, version in pins("gpu")}
    assert {"torch", "numpy", "pydantic", "pytest", "fla-core", "accelerate"} <= {name for name, _ in declared}
    for name, wanted in declared:
        version = tuple(int(part) for part in re.findall(r"\d+", installed[name.replace("_", "-")]))
        for comparison, bound in re.findall(r"(>=|<|==)([0-9.]+)", wanted):
            limit = tuple(int(part) for part in bound.split("."))
            assert {">=": version >= limit, "<": version < limit, "==": version == limit}[comparison], (name, wanted)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--cpu", "--gpu"], "install: --cpu and --gpu exclude each other. Give one."),
        (["--tpu"], "install: unknown argument '--tpu': expected --cpu, --gpu or --force."),
    ],
)
def test_bad_arguments(arguments: list[str], line: str, tmp_path: Path) -> None:
    result = run("bash", LAUNCH / "install.sh", *arguments, NEXTTRANSFORMER_VENV=str(tmp_path / "venv"))
    assert (result.returncode, result.stderr.splitlines()) == (2, [line])
    assert not (tmp_path / "venv").exists()


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    result = run("bash", LAUNCH / "install.sh", "--cpu", NEXTTRANSFORMER_VENV=str(tmp_path))
    assert result.returncode == 2
    assert "exists and is no Python environment" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_an_unsupported_python_is_refused(tmp_path: Path) -> None:
    venv = str(tmp_path / "venv")
    result = run("bash", LAUNCH / "install.sh", "--cpu", NEXTTRANSFORMER_VENV=venv, NEXTTRANSFORMER_PYTHON="false")
    assert result.returncode == 2
    assert result.stderr == "install: NEXTTRANSFORMER_PYTHON=false: expected a Python 3.10 to 3.13.\n"


def test_an_unchanged_installation_is_skipped(tmp_path: Path) -> None:
    """An environment whose record matches is not touched, and the kind is remembered."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    version = ".".join(str(part) for part in sys.version_info[:3])
    digest = hashlib.sha256(f"{ROOT}\n{version}\n".encode())
    for name in ("constraints/cpu.txt", "pyproject.toml", "src/nexttransformer/__init__.py"):
        digest.update((ROOT / name).read_bytes())
    (venv / "install_key").write_text(f"cpu {digest.hexdigest()}\n")
    for arguments in ([], ["--cpu"]):
        result = run("bash", LAUNCH / "install.sh", *arguments, NEXTTRANSFORMER_VENV=str(venv))
        assert result.returncode == 0, result.stderr
        assert result.stdout == f"install: {venv} is up to date (cpu, Python {version}).\n"
