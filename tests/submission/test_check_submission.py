"""The gate: a valid request passes, and each change gives exactly its findings."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nexttransformer import check_submission, jsonio
from nexttransformer.board.render import render_site
from nexttransformer.errors import ConfigError
from nexttransformer.export.record import Record
from nexttransformer.submission.gate import Judgement, judge
from nexttransformer.submission.git_tree import GitRepository
from nexttransformer.submission.subject import Subject
from tests.submission.requests import (
    AUDIT,
    METHOD,
    RECORD,
    Json,
    Repository,
    edited,
    make_audit,
    make_record,
    sealed,
    sha,
    valid_files,
)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def judged(repository: Repository, division: str = "formal") -> Judgement:
    git = GitRepository(repository.root)
    return judge(Subject.open(git, base="main", head="request", division=division))  # type: ignore[arg-type]


def found(judgement: Judgement) -> set[tuple[str, str]]:
    return {(finding.id, finding.severity) for finding in judgement.findings}


def pages(folder: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Returns the site built from evidence files."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "evidence").mkdir(exist_ok=True, parents=True)
    return {f"site/{name}": content for name, content in render_site(folder / "evidence").items()}


def test_a_valid_request(repository: Repository) -> None:
    repository.branch(valid_files())
    judgement = judged(repository)
    assert judgement.lines()[-2:] == [
        f"dense_full is accepted: 0 errors, 0 warnings, 0 unjudged, 0 published numbers changed; merge base "
        f"{judgement.subject.base[:12]}.",
        "People still judge H1, H2, H3, H4, H5, H6.",
    ]
    assert judgement.exit_code == 0 and judgement.findings == []


def test_main_going_on_changes_nothing(repository: Repository) -> None:
    repository.branch(valid_files())
    repository.git("checkout", "-q", "main")
    repository.commit({"README.md": b"# Another\n", **valid_files("gdn_hybrid", "hybrid")})
    assert judged(repository).findings == []


def number(record: Json, audit: Json) -> None:
    """Lowers the final BPB consistently, as a forger would."""
    final = record["results"]["bpb_final"]
    final["nats"] *= 0.99
    final["nats_hex"] = final["nats"].hex()
    final["bpb"] = final["nats"] / (math.log(2) * final["bytes"])


def set_key(path: str, value: object) -> Callable[[Json, Json], None]:
    """Returns an edit of `record.…` or `audit.…`."""
    which, *keys = path.split(".")

    def edit(record: Json, audit: Json) -> None:
        target: object = record if which == "record" else audit
        for key in keys[:-1]:
            target = target[int(key) if key.isdigit() else key]  # type: ignore[index]
        last = keys[-1]
        target[int(last) if last.isdigit() else last] = value  # type: ignore[index]

    return edit


EDITS = [
    ("L3", "record.method", "sssl"),
    ("L3", "audit.method", "sssl"),
    ("L3", "record.family", "hybrid"),
    ("P1", "record.protocol.digest", "0" * 64),
    ("P6", "record.display_name", "Run of ada@example.org"),
    ("P6", "record.training.attempts.0.gpus", {"NVIDIA H200": 7}),
    ("P6", "record.training.versions.torch", "2.13 in /home/ada/torch"),
    ("E1", "record.results.bpb_final.bpb", 0.6),
    ("E1", "record.results.bpb_final.nats", 1.0),
    ("E1", "record.results.bpb_curve.75", [46_876, 0.67]),
    ("E3", "record.results.core.curve.14", [46_875, 0.5, 0.4]),
    ("E3", "record.results.core.tasks.0.num_correct", 5022),
    ("E3", "record.results.core.tasks.1.rows", 500),
    ("E3", "record.results.core.tasks.2.label", "another"),
    ("E3", "record.results.core.core_limited", 0.3),
    ("E3", "record.results.core.curve.3", [12_500, None, None]),
    ("K3", "audit.verdict", "refused"),
    ("K3", "audit.mode", "open"),
    ("K3", "record.division", "demo"),
    ("K3", "record.digests.run", "0" * 64),
    ("K3", "record.digests.weights", "0" * 64),
    ("K3", "record.run_id", "0" * 16),
    ("K3", "record.audit.warning_ids", []),
    ("K3", "audit.checks.C4", "fail"),
    ("K3", "audit.checks.N2", "pass"),
    ("K3", "audit.checks.N2", "waived"),
    ("R2", "record.supersedes", {"record_digest": "0" * 64, "reason": "new seed"}),
]


@pytest.mark.parametrize(("rule", "path", "value"), EDITS, ids=[f"{rule} {path}" for rule, path, _ in EDITS])
def test_each_change_gives_its_finding(repository: Repository, rule: str, path: str, value: object) -> None:
    repository.branch(valid_files(edit=set_key(path, value)))
    judgement = judged(repository)
    # A protocol that only one of both names is also a pair that does not fit.
    also = {("K3", "error")} if path == "record.protocol.digest" else set()
    assert found(judgement) == {(rule, "error")} | also
    assert judgement.exit_code == 1
    assert any(line.startswith(f"Rule {rule}: ") for line in judgement.lines())


def test_p1_in_both_files(repository: Repository) -> None:
    def edit(record: Json, audit: Json) -> None:
        for each in (record, audit):
            each["protocol"] = {**each["protocol"], "digest": "0" * 64}

    repository.branch(valid_files(edit=edit))
    assert found(judged(repository)) == {("P1", "error")}


def test_k3_an_audit_of_other_bytes(repository: Repository) -> None:
    files = valid_files()
    repository.branch(edited(files, AUDIT, lambda audit: audit.update(last_seq=401)))
    assert found(judged(repository)) == {("K3", "error")}


def test_k3_two_records_of_one_run(repository: Repository) -> None:
    other = make_audit("gdn_hybrid")
    record = make_record(other, "gdn_hybrid", "hybrid")

    def edit(record: Json, audit: Json) -> None:
        record["digests"]["weights"] = audit["final_weights_digest"] = other["final_weights_digest"]

    repository.branch(valid_files(edit=edit))
    assert judged(repository).findings == []
    # Merged while the request was open.
    repository.git("checkout", "-q", "main")
    repository.commit(sealed(record, other, "gdn_hybrid"))
    judgement = judged(repository)
    assert found(judgement) == {("K3", "error")}
    assert [finding.where for finding in judgement.findings] == [f"{RECORD} digests.weights"]


def test_k4_another_form_of_the_same_values(repository: Repository) -> None:
    files = valid_files()
    repository.branch({**files, RECORD: json.dumps(json.loads(files[RECORD]), indent=2).encode()})
    assert found(judged(repository)) == {("K4", "error")}


def test_l4_one_bad_value_one_extra_key_one_truncated_file(repository: Repository) -> None:
    files = valid_files(edit=set_key("record.run_id", 7))
    files = edited(files, RECORD, lambda record: record.update(note="hello"))
    repository.branch({**files, AUDIT: files[AUDIT][:100]})
    judgement = judged(repository)
    errors = [finding for finding in judgement.findings if finding.severity == "error"]
    assert {finding.id for finding in errors} == {"L4"} and len(errors) == 3
    assert {finding.severity for finding in judgement.findings if finding.id != "L4"} == {"unjudged"}
    assert judgement.exit_code == 1


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 5000, b'{"a": NaN}', b'{"a": 1, "a": 2}', b"[]", b"1e999"])
def test_garbage_never_passes_and_never_crashes(repository: Repository, content: bytes) -> None:
    repository.branch({**valid_files(), RECORD: content})
    judgement = judged(repository)
    assert ("L4", "error") in found(judgement) and judgement.exit_code == 1
    assert all("could not be decided" not in finding.message for finding in judgement.findings)


def test_l5_a_link_a_space_and_a_long_file(repository: Repository) -> None:
    repository.branch(valid_files(edit=set_key("record.citation", "x" * 2999)))
    os.symlink("dense_full.json", repository.root / "evidence/runs/a b.json")
    repository.commit({})
    judgement = judged(repository)
    assert found(judgement) == {("R1", "error"), ("L5", "warning")}
    assert len([finding for finding in judgement.findings if finding.id == "L5"]) == 2


def test_a_link_instead_of_the_record(repository: Repository) -> None:
    files = valid_files()
    repository.branch({AUDIT: files[AUDIT], "evidence/runs/.keep": b""})
    os.symlink("../../README.md", repository.root / RECORD)
    repository.commit({"evidence/runs/.keep": None})
    judgement = judged(repository)
    assert {("L4", "error"), ("L5", "warning")} <= found(judgement) and judgement.exit_code == 1


@pytest.mark.parametrize(
    "extra",
    [
        {"src/nexttransformer/protocol.py": b"# other\n"},
        {"evidence/waivers.json": b"[]\n"},
        {"README.md": None},
        {"configs/baseline/dense_full.json": b"{ }\n"},
        {"evidence/demo/runs/dense_full.json": b"{}\n"},
        {"evidence/runs/notes.txt": b"x"},
        {".github/workflows/submission.yml": b"x"},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_r1_other_files(repository: Repository, extra: dict[str, bytes | None]) -> None:
    repository.branch({**valid_files(), **extra})
    judgement = judged(repository)
    assert found(judgement) == {("R1", "error")}
    assert [finding.where for finding in judgement.findings] == list(extra)


def test_r1_two_methods_or_one_file(repository: Repository) -> None:
    repository.branch({**valid_files(), **valid_files("gdn_hybrid", "hybrid")})
    assert found(judged(repository)) == {("R1", "error")}
    repository.git("checkout", "-q", "main")
    repository.git("branch", "-q", "-D", "request")
    repository.branch({RECORD: valid_files()[RECORD]})
    assert {("R1", "error"), ("L4", "error")} <= found(judged(repository))


def test_r2_a_changed_digit(repository: Repository) -> None:
    repository.commit(valid_files())
    repository.branch(valid_files(edit=number))
    judgement = judged(repository)
    assert found(judgement) == {("R2", "error")}
    names = {change.name for change in judgement.changes}
    assert names == {"bpb_final.bpb", "bpb_final.nats"}
    assert any(line.startswith("Changes bpb_final.bpb: 0.6676") and "(-0.00667" in line for line in judgement.lines())


def test_r2_the_old_record_is_named(repository: Repository) -> None:
    repository.commit(valid_files())
    old = Record.from_json(json.loads(valid_files()[RECORD]), "old")

    def edit(record: Json, audit: Json) -> None:
        number(record, audit)
        record["supersedes"] = {"record_digest": old.record_digest, "reason": "Bytes were counted twice."}

    repository.branch(valid_files(edit=edit))
    judgement = judged(repository)
    assert judgement.findings == [] and len(judgement.changes) == 2 and judgement.exit_code == 0


def test_r2_a_record_disappears_or_becomes_another_run_s(repository: Repository) -> None:
    repository.commit(valid_files())
    repository.branch({RECORD: None})
    assert {("R1", "error"), ("L4", "error")} <= found(judged(repository))
    repository.git("checkout", "-q", "main")
    repository.git("branch", "-q", "-D", "request")

    def edit(record: Json, audit: Json) -> None:
        record["run_id"] = audit["run_id"] = sha("other")[:16]

    repository.branch(valid_files(edit=edit))
    assert found(judged(repository)) == {("R2", "error")}


def test_r3_pages(repository: Repository, tmp_path: Path) -> None:
    files = valid_files()
    repository.commit(pages(tmp_path / "before", {}))
    repository.branch(files)
    assert judged(repository).findings == [], "left alone"
    built = pages(tmp_path / "after", files)
    repository.commit(built)
    assert judged(repository).findings == [], "rebuilt from this request's records"
    repository.commit(
        {"site/en/index.html": built["site/en/index.html"].replace(b"0.66", b"0.65"), "site/new.html": b""}
    )
    judgement = judged(repository)
    assert found(judgement) == {("R3", "error")}
    assert [finding.where for finding in judgement.findings] == ["site/en/index.html", "site/new.html"]


def test_waivers_are_those_of_the_merge_base(repository: Repository) -> None:
    def edit(record: Json, audit: Json) -> None:
        finding = {**audit["findings"][0], "id": "P3", "severity": "error", "message": "The commit is gone."}
        audit["findings"] += [finding]
        audit["checks"]["P3"] = "waived"
        audit["counts"]["waived"] = record["audit"]["num_waivers"] = 1

    waiver = {
        "run_digest": make_audit()["run_digest"],
        "check": "P3",
        "reason": "The commit was rewritten by a mirror; its files are known.",
        "reviewer": "ada",
        "issue": "17",
    }
    waivers = jsonio.pretty_bytes({"schema": "nexttransformer.waivers/1", "waivers": [waiver]})
    repository.branch({**valid_files(edit=edit), "evidence/waivers.json": waivers})
    assert found(judged(repository)) == {("R1", "error"), ("K3", "error")}
    repository.git("checkout", "-q", "main")
    repository.git("branch", "-q", "-D", "request")
    repository.commit({"evidence/waivers.json": waivers})
    repository.branch(valid_files(edit=edit))
    assert judged(repository).findings == []


def test_damaged_waivers_of_the_merge_base(repository: Repository) -> None:
    repository.commit({"evidence/waivers.json": b"[]\n"})
    repository.branch(valid_files())
    judgement = judged(repository)
    assert ("K3", "unjudged") in found(judgement) and judgement.exit_code == 2
    assert "evidence/waivers.json" in {finding.where for finding in judgement.findings}


def test_what_may_never_be_waived(repository: Repository) -> None:
    waiver = {"run_digest": make_audit()["run_digest"], "check": "K1", "reason": "r", "reviewer": "a", "issue": "1"}
    repository.commit(
        {"evidence/waivers.json": jsonio.pretty_bytes({"schema": "nexttransformer.waivers/1", "waivers": [waiver]})}
    )
    repository.branch(valid_files(edit=set_key("audit.checks.K1", "waived")))
    assert found(judged(repository)) == {("K3", "error")}


def test_the_command(repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository.branch(valid_files())
    summary = tmp_path / "summary.md"
    (repository.root / AUDIT).write_text("changed and not committed")
    assert check_submission.main(["--repository", str(repository.root), "--summary", str(summary)]) == 0
    printed = capsys.readouterr().out
    assert "dense_full is accepted" in printed and f"not committed and not judged: {AUDIT}" in printed
    assert summary.read_text().startswith("### Submission check\n\n- `dense_full is accepted")
    repository.commit({RECORD: b"{}\n"})
    assert check_submission.main(["--repository", str(repository.root / "src")]) == 1


def test_what_cannot_be_judged(repository: Repository, tmp_path: Path) -> None:
    where = ["--repository", str(repository.root)]
    with pytest.raises(ConfigError, match="Nothing to judge"):
        check_submission.main(where)
    with pytest.raises(ConfigError, match="no-such"):
        check_submission.main([*where, "--base", "no-such"])
    with pytest.raises(ConfigError, match="git rev-parse"):
        check_submission.main(["--repository", str(tmp_path)])
    repository.git("branch", "-q", "-m", "main", "trunk")
    with pytest.raises(ConfigError, match="--base"):
        check_submission.main(where)


def test_the_demo_division(repository: Repository, tmp_path: Path) -> None:
    """The formal gate refuses what the demo gate judges."""
    files = {path.replace("evidence/", "evidence/demo/"): content for path, content in valid_files().items()}
    repository.branch({**files})
    assert ("R1", "error") in found(judged(repository))
    judgement = judged(repository, "demo")
    assert {("K3", "error"), ("P1", "error")} <= found(judgement)
    assert "in the DEMO division" in judgement.lines()[-1]


def test_mutation_of_the_method_name(repository: Repository) -> None:
    files = valid_files()
    repository.branch({path.replace(METHOD, "sssl"): content for path, content in files.items()})
    assert found(judged(repository)) == {("L3", "error")}
