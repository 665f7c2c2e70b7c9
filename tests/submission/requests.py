"""Repositories with a pull request in them: a formal record and audit that follow every rule, to be changed."""

import hashlib
import json
import math
import subprocess
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from nexttransformer import jsonio
from nexttransformer.audit.reference import make_reference
from nexttransformer.audit.report import AuditRecord
from nexttransformer.audit.rules import RULES, RUN_RULE_IDS
from nexttransformer.evaluation.core_result import centered
from nexttransformer.export.record import Record
from nexttransformer.protocol import FORMAL_V1

METHOD, FAMILY = "dense_full", "baseline"
RECORD, AUDIT = f"evidence/runs/{METHOD}.json", f"evidence/audits/{METHOD}.json"
Json = dict[str, Any]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_audit(method: str = METHOD) -> Json:
    """Returns a passing audit with one warning."""
    statuses = {rule: "pass" if "A" in RULES[rule].stages else "deferred" for rule in RUN_RULE_IDS}
    return {
        "schema": AuditRecord.SCHEMA,
        "division": "formal",
        "method": method,
        "run_id": sha(method)[:16],
        "mode": "formal",
        "protocol": {"id": FORMAL_V1.id, "digest": FORMAL_V1.digest},
        "package_version": "0.1.0",
        "source_digest": sha("source"),
        "run_digest": sha(f"run {method}"),
        "last_seq": 400,
        "final_weights_digest": sha(f"weights {method}"),
        "data_chain": "0123456789abcdef",
        "verdict": "pass",
        "checks": {**statuses, "N2": "warn"},
        "findings": [
            {
                "id": "N2",
                "severity": "warning",
                "message": "2 loss spikes.",
                "where": "metrics.jsonl:812",
                "expected": None,
                "got": None,
            }
        ],
        "counts": {"errors": 0, "warnings": 1, "unjudged": 0, "waived": 0, "attempts": 1, "superseded_updates": 0},
    }


def make_record(audit: Json, method: str = METHOD, family: str = FAMILY) -> Json:
    """Returns a record of that audit's run."""
    tasks = []
    for entry in make_reference(FORMAL_V1.id).core_tasks["tasks"]:
        correct = entry["rows"] // 2
        tasks.append(
            {
                "label": entry["label"],
                "num_correct": correct,
                "rows": entry["rows"],
                "centered_v1": centered(correct / entry["rows"], entry["random_baseline"]),
                "centered_v2": centered(correct / entry["rows"], entry["random_baseline_v2"]),
            }
        )
    means = [math.fsum(task[f"centered_{version}"] for task in tasks) / 22 for version in ("v1", "v2")]
    nats, num_bytes = 8.7e7, 188_000_000
    names = "config source parts manifest tokenizer byte_table data_order val_curve val_final core_bundle"
    digests = {key: sha(key) for key in names.split()}
    return {
        "schema": Record.SCHEMA,
        "division": "formal",
        "method": method,
        "family": family,
        "display_name": "Dense Baseline",
        "track": "main",
        "protocol": {**audit["protocol"]},
        "package_version": "0.1.0",
        "commit": "a" * 40,
        "run_id": audit["run_id"],
        "model": {
            "num_parameters": 1_355_810_568,
            "num_lookup": 654_311_424,
            "num_matmul": 701_499_096,
            "training_flops_per_token": 4_643_317_008,
            "flops_ratio": 1.0,
            "matmul_ratio": 1.0,
            "decode_state_bytes": 289_406_976,
        },
        "training": {
            "num_updates": FORMAL_V1.num_updates,
            "tokens": FORMAL_V1.num_tokens,
            "seed": 42,
            "attempts": [
                {
                    "attempt": 0,
                    "world_size": 8,
                    "num_nodes": 1,
                    "micro_batch": 8,
                    "gpus": {"NVIDIA H200": 8},
                    "first_update": 0,
                    "last_update": FORMAL_V1.num_updates,
                }
            ],
            "gpu_hours": 350.5,
            "median_tokens_per_second": 312_000.25,
            "versions": {"torch": "2.13.0", "cuda": "13.0", "fla": None},
        },
        "results": {
            "bpb_final": {
                "nats_hex": nats.hex(),
                "nats": nats,
                "bytes": num_bytes,
                "tokens_counted": 41_900_000,
                "bpb": nats / (math.log(2) * num_bytes),
            },
            "bpb_curve": [[update, 3.0 / (1 + update / 9000)] for update in FORMAL_V1.bpb_updates()],
            "core": {
                "curve": [[update, *means] for update in FORMAL_V1.core_updates()],
                "core_limited": None,
                "tasks": tasks,
            },
        },
        "digests": {
            **digests,
            "data_chain": audit["data_chain"],
            "weights": audit["final_weights_digest"],
            "complete": sha("complete"),
            "run": audit["run_digest"],
            "audit": "",
            "package": {"README.md": sha("card"), "model.safetensors": sha("file")},
        },
        "audit": {"verdict": "pass", "num_warnings": 1, "num_waivers": 0, "warning_ids": ["N2"]},
        "supersedes": None,
        "authors": ["Ada Example"],
        "licence": "Apache-2.0",
        "citation": None,
        "links": [{"title": "Paper", "url": "https://example.org/paper"}],
    }


def sealed(record: Json, audit: Json, method: str = METHOD) -> dict[str, bytes]:
    """Returns both files, the record naming the audit's digest."""
    audit_bytes = jsonio.pretty_bytes(audit)
    record = deepcopy(record)
    record["digests"]["audit"] = hashlib.sha256(audit_bytes).hexdigest()
    return {
        f"evidence/runs/{method}.json": jsonio.pretty_bytes(record),
        f"evidence/audits/{method}.json": audit_bytes,
    }


def valid_files(method: str = METHOD, family: str = FAMILY, edit: Callable[[Json, Json], None] | None = None):  # noqa: ANN201
    """Returns the two files of a valid submission, after `edit(record, audit)`."""
    audit = make_audit(method)
    record = make_record(audit, method, family)
    if edit is not None:
        edit(record, audit)
    return sealed(record, audit, method)


class Repository:
    """A git repository with a branch `main`; `commit` adds to the branch at hand."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "-q", "-b", "main")
        self.commit(
            {
                f"configs/{FAMILY}/{METHOD}.json": b"{}\n",
                "configs/hybrid/gdn_hybrid.json": b"{}\n",
                "src/nexttransformer/protocol.py": b"# protocol\n",
                "README.md": b"# Readme\n",
            }
        )

    def git(self, *words: str) -> str:
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        result = subprocess.run(["git", *identity, *words], cwd=self.root, capture_output=True, text=True, check=True)
        return result.stdout

    def commit(self, files: Mapping[str, bytes | None]) -> None:
        """Writes files (None removes) and commits them."""
        for name, content in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "change")

    def branch(self, files: Mapping[str, bytes | None]) -> None:
        """Makes the pull request: a branch from main with one commit."""
        self.git("checkout", "-q", "-b", "request")
        self.commit(files)


def edited(files: dict[str, bytes], path: str, edit: Callable[[Json], None]) -> dict[str, bytes]:
    """Returns the files with one JSON file changed and written in the same form."""
    value = json.loads(files[path])
    edit(value)
    return {**files, path: jsonio.pretty_bytes(value)}
