"""The session's finished run, audited and exported once by the real commands; read-only for tests."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from nexttransformer import jsonio, provenance
from nexttransformer.audit.reference import make_reference
from nexttransformer.audit.report import audit_run
from nexttransformer.export.record import Record, load_record
from nexttransformer.export.reload_check import Reload
from nexttransformer.export.run_export import Request
from tests.finished_run import METHOD, make_run

ROOT = Path(__file__).parents[2]
NAME = "Dense Baseline"
SUBMISSION = {
    "schema": "nexttransformer.submission/1",
    "authors": ["Ada Example", "Ben Sample"],
    "licence": "Apache-2.0",
    "citation": "@misc{example2026,\n  title = {An example},\n  url = {https://example.org/paper}\n}",
    "links": [{"title": "Paper", "url": "https://example.org/paper"}],
}


@dataclass(frozen=True)
class ExportedRun:
    """Paths of everything, and what the command printed."""

    site: Path
    run: Path
    audit: Path
    record_path: Path
    package: Path
    submission: Path
    output: str

    @property
    def record(self) -> Record:
        return load_record(self.record_path)

    def request(self, folder: Path, **changes: object) -> Request:
        """Returns the same export into another folder."""
        made = Request(
            run=self.run,
            method=METHOD,
            display_name=NAME,
            audit=self.audit,
            output=folder / "runs" / f"{METHOD}.json",
            folder=folder / "package",
            submission=self.submission,
            site=self.site,
            say=_quiet,
        )
        return replace(made, **changes)  # type: ignore[arg-type]


def _quiet(line: str) -> None:
    return


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a command run by a test."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1", **more}


def command(module: str, *words: object, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of the package as a user does."""
    line = [sys.executable, "-m", f"nexttransformer.{module}", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, env=environment(**more), cwd=cwd, timeout=220)


def finished(site: Path) -> tuple[Path, dict[str, str]]:
    """Returns the session's run and the package's files of the moment it was made."""
    folder = site.parent / "finished_run"
    run = make_run(site, folder, provenance.package_files())
    return run, json.loads(folder.with_suffix(".files.json").read_text())


def write_audit(run: Path, path: Path) -> None:
    """Audits a run in this process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(audit_run(run, METHOD, make_reference("test-v1")).to_bytes())


def make_export(site: Path, run: Path) -> ExportedRun:
    """Exports with the command, once for all workers of the session."""
    folder = site.parent / "exported"
    made = ExportedRun(
        site=site,
        run=run,
        audit=folder / f"evidence/demo/audits/{METHOD}.json",
        record_path=folder / f"evidence/demo/runs/{METHOD}.json",
        package=folder / "package",
        submission=folder / "submission.json",
        output=str(folder / "output.txt"),
    )
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "output.txt").exists():
            shutil.rmtree(folder, ignore_errors=True)
            write_audit(run, made.audit)
            made.submission.write_bytes(jsonio.pretty_bytes(SUBMISSION))
            words = ["--method", METHOD, "--name", NAME, "--audit", made.audit, "--submission", made.submission]
            words += ["--export-dir", made.package, "--site-config", site]
            # The default place of the record counts from the current folder.
            result = command("export_run", run, *words, cwd=folder)
            assert result.returncode == 0, result.stdout + result.stderr
            (folder / "output.txt").write_text(result.stdout)
    return replace(made, output=(folder / "output.txt").read_text())


def stored_reload(result: Reload) -> Callable[..., Reload]:
    """Returns a stand-in for the fresh process that answers at once."""
    return lambda folder, *, num_threads: result
