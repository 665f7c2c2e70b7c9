"""The report command over finished, running, compared and damaged runs."""

import json
import random
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nexttransformer import report
from nexttransformer.errors import CheckpointError, ConfigError
from nexttransformer.reporting import noise
from nexttransformer.reporting.run_view import read_run
from nexttransformer.reporting.words import REPORT_WORDS, words_of
from tests.reporting.synthetic import Launch, evaluation, loss, write_run

WHOLE = [Launch(0, 8, "killed"), Launch(5, 20, "finished")]


class Page(HTMLParser):
    """Collects tags, text and the data of scripts; complains about tags that do not close."""

    VOID = ("meta", "link", "img", "br", "input", "rect", "circle", "path", "line")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.sources: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.scripts.append(data)
        elif data.strip():
            self.words.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(self.words)


def make_page(capsys: pytest.CaptureFixture[str], output: Path, *arguments: object) -> Page:
    assert report.main([str(item) for item in arguments] + ["--output", str(output)]) == 0
    capsys.readouterr()
    return Page(output.read_text(encoding="utf-8"))


def figure_data(page: Page) -> dict:
    return next(json.loads(text) for text in page.scripts if text.startswith('{"figures"'))


def test_page_of_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = write_run(tmp_path / "dense", WHOLE)
    assert report.main([str(root)]) == 0
    out = capsys.readouterr().out
    assert "dense: finished, update 20 of 20" in out and str(root / "report.html") in out
    text = (root / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    # Self-contained: nothing is loaded from anywhere, plotly is inside once.
    assert [source for source in page.sources if not source.startswith(("#", "data:"))] == []
    assert len([script for script in page.scripts if "plotly.js v" in script]) == 1
    final = loss(20) / 4.3 + 0.004
    for shown in (f"{final:.4f}", "test-v1", "NVIDIA H200", "checkpoint_00000005", "2.12.0", "hellaswag_zeroshot"):
        assert shown in page.text
    assert words_of("en")["core_limited"] in page.text and words_of("en")["no_audit"] in page.text
    assert "no end recorded" in page.text and "built-in method" not in page.text
    figures = {figure["id"]: figure for figure in figure_data(page)["figures"]}
    assert set(figures) == {"loss", "bpb", "rates", "norm", "speed", "momentum", "decay"}
    past = [trace for trace in figures["loss"]["traces"] if trace["kind"] == "past"]
    assert [trace["x"] for trace in past] == [[6, 7, 8]]
    assert [trace["x"] for trace in figures["loss"]["traces"] if trace["kind"] != "past"] == [list(range(1, 21))] * 2
    assert figures["bpb"]["traces"][0]["x"] == [0, 5, 10, 15, 20]
    assert [trace["name"] for trace in figures["rates"]["traces"]] == ["matrix", "group 1"]


def test_page_is_the_same_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = write_run(tmp_path / "dense", WHOLE)
    make_page(capsys, tmp_path / "a.html", root)
    make_page(capsys, tmp_path / "b.html", root)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_page_names_no_path_and_no_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = make_page(capsys, tmp_path / "a.html", write_run(tmp_path / "dense", WHOLE))
    assert str(tmp_path) not in page.text + "".join(page.scripts)


def test_running_run_shows_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = write_run(tmp_path / "dense", [Launch(0, 8, "killed")], status="running")
    assert read_run(root, "dense").status == "interrupted"
    (root / "train.lock").write_text(
        json.dumps({"token": "t", "host": "elsewhere", "process_id": 1, "process_start": 0, "attempt": 0})[:-1]
        + ', "counter": 1, "beat_seconds": 1.0}'
    )
    page = make_page(capsys, tmp_path / "a.html", root)
    assert "running" in page.text and "left" in page.text
    assert 'aria-valuenow="40"' in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    common: dict[str, Any] = {"protocol_id": "formal-v1", "mode": "formal"}
    tie = 0.9 * noise.BPB_BAND * 4.3
    roots = [
        write_run(tmp_path / "one/run", WHOLE, **common),
        write_run(tmp_path / "two/run", WHOLE, shift=-tie, run_id="1" * 16, **common),
        write_run(tmp_path / "better", WHOLE, shift=-0.043, run_id="2" * 16, **common),
    ]
    monkeypatch.chdir(tmp_path)
    assert report.main([str(root) for root in roots]) == 0
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "one/run" in page.text and "two/run" in page.text
    assert re.search(r"\u22120\.000\d \(not distinguishable\)", page.text)
    assert "\u22120.0100" in page.text and "\u22120.0100 (not" not in page.text
    figures = {figure["id"]: figure for figure in figure_data(page)["figures"]}
    assert figures["difference"]["band"] == pytest.approx(6.5e-4, rel=0.01)
    assert figures["difference"]["traces"][1]["y"] == pytest.approx([-0.01] * 5, rel=1e-3)
    assert all(trace["kind"] != "past" for trace in figures["loss"]["traces"])
    assert words_of("en")["no_noise_note"] not in page.text


def test_runs_of_different_protocols_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    roots = [write_run(tmp_path / "a", WHOLE), write_run(tmp_path / "b", WHOLE, protocol_id="demo-v1")]
    page = make_page(capsys, tmp_path / "a.html", *roots)
    assert words_of("en")["mixed_note"] in page.text
    assert "difference" not in {figure["id"] for figure in figure_data(page)["figures"]}


def test_chinese_page_and_equal_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = make_page(capsys, tmp_path / "a.html", write_run(tmp_path / "dense", WHOLE), "--lang", "zh")
    assert "训练损失" in page.text and words_of("zh")["no_audit"] in page.text
    for key, english in words_of("en").items():
        # In a template `w.items` would be the dictionary's method.
        assert not hasattr(dict, key)
        fields = re.findall(r"{(\w+)", english)
        assert sorted(fields) == sorted(re.findall(r"{(\w+)", words_of("zh")[key])), key


def test_audit_is_found_by_run_id_and_staleness_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    root = write_run(tmp_path / "runs/dense", WHOLE)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "evidence/audits"
    folder.mkdir(parents=True)
    view = read_run(root, "dense")
    audit = {
        "schema": "nexttransformer.audit/1",
        "run_id": view.facts["run_id"],
        "verdict": "refused",
        "division": "formal",
        "last_seq": view.events[-1].seq,
        "checks": {"C4": "fail", "L1": "pass"},
        "findings": [
            {
                "id": "C4",
                "severity": "error",
                "message": "learning rate differs <b>",
                "where": "metrics.jsonl:3",
                "expected": 0.02,
                "got": 0.03,
            }
        ],
    }
    (folder / "toy.json").write_text(json.dumps(audit))
    (folder / "other.json").write_text("{")
    page = make_page(capsys, tmp_path / "a.html", root)
    assert "refused" in page.text and "learning rate differs <b>" in page.text and "0.03" in page.text
    assert words_of("en")["audit_stale"] not in page.text
    (folder / "toy.json").write_text(json.dumps({**audit, "last_seq": 3}))
    assert words_of("en")["audit_stale"] in make_page(capsys, tmp_path / "a.html", root).text
    (folder / "toy.json").write_text("{")
    assert read_run(root, "dense").audit is None
    (folder / "dense.json").write_text(json.dumps({**audit, "run_id": "f" * 16}))
    assert read_run(root, "dense").audit is None


def test_static_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    roots = [write_run(tmp_path / "a<b", WHOLE), write_run(tmp_path / "b", WHOLE, shift=0.1)]
    make_page(capsys, tmp_path / "a.html", *roots, "--svg", tmp_path / "plot.svg")
    drawing = ElementTree.fromstring((tmp_path / "plot.svg").read_text(encoding="utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    lines = [item for item in drawing.iter(f"{space}path") if "line" in item.get("class", "") and item.get("d")]
    assert len(lines) == 2 + 4
    assert "a<b" in [item.text for item in drawing.iter(f"{space}text")]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"schema": "other"}', b"null"])
def test_damaged_run_json_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes):
    root = write_run(tmp_path / "dense", WHOLE)
    (root / "run.json").write_bytes(content)
    page = make_page(capsys, tmp_path / "a.html", root)
    assert words_of("en")["problems"] in page.text and "run.json" in page.text


def test_damaged_lines_are_named_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = write_run(tmp_path / "dense", WHOLE)
    lines = (root / "metrics.jsonl").read_bytes().split(b"\n")
    lines[9] = lines[9][:40]
    lines[12] = lines[12].replace(b'"loss_nats":', b'"loss_nats":"x","was":')
    (root / "metrics.jsonl").write_bytes(b"\n".join(lines))
    (root / "evaluations/final.json").write_text('{"kind": "final", "update": 20, "bpb": {"val_final": {"bpb": "x"}}}')
    (root / "evaluations/core_00000020.json").unlink()
    assert report.main([str(root)]) == 0
    out = capsys.readouterr().out
    for named in ("metrics.jsonl:10", "metrics.jsonl:13", "evaluations/final.json: bpb.val_final.bpb"):
        assert f"could not be read: {named}" in out
    assert len(read_run(root, "dense").timeline.effective) >= 18


def test_any_damage_leaves_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """100 random edits, cuts and deletions: always a page or one clear line, never a traceback."""
    generator = random.Random(5)
    source = write_run(tmp_path / "source", WHOLE)
    files = {path.relative_to(source): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    root = tmp_path / "damaged"
    for path in files:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
    for _ in range(100):
        for path, content in files.items():
            (root / path).write_bytes(content)
        for path in generator.sample(sorted(files), 2):
            content = bytearray(files[path])
            kind = generator.randrange(4)
            if kind == 0:
                (root / path).unlink()
                continue
            place = generator.randrange(len(content))
            if kind == 1:
                content[place] = generator.randrange(256)
            elif kind == 2:
                del content[place:]
            else:
                value = generator.choice([b"null", b"-1", b"NaN", b"[]", b"1e999", b'"x"', b"{}"])
                content[place : place + 1] = value
            (root / path).write_bytes(content)
        view = read_run(root, "damaged")
        _ = report.render_report([view], "en")
        _ = report.draw_svg([view], words_of("en"))


def test_what_is_no_run_is_refused_all_at_once(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError) as caught:
        report.main([str(tmp_path / "empty"), str(tmp_path / "absent")])
    assert "empty: holds no run.json" in str(caught.value) and "absent: is no folder" in str(caught.value)
    root = write_run(tmp_path / "dense", WHOLE)
    with pytest.raises(ConfigError, match="cannot be written"):
        report.main([str(root), "--output", str(tmp_path / "no/such/folder/a.html")])


def test_no_file_of_the_run_is_replaced(tmp_path: Path):
    root = write_run(tmp_path / "dense", WHOLE)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as caught:
        report.main([str(root), "--output", str(root / "run.json"), "--svg", str(root / "events.jsonl")])
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["--output", "--svg"]
    with pytest.raises(ConfigError, match="--svg .*: is the file of the page as well"):
        report.main([str(root), "--output", str(tmp_path / "a"), "--svg", str(tmp_path / "a")])
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_speed_of_a_short_run_leaves_out_the_update_that_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = write_run(tmp_path / "dense", [Launch(0, 2, "finished")], num_updates=2)
    lines = [json.loads(each) for each in (root / "metrics.jsonl").read_text().splitlines()]
    for values, (seconds, speed) in zip(lines, [(70.9, 14_780.0), (10.1, 103_320.0)], strict=True):
        values |= {"seconds": seconds, "tokens_per_second": speed, "peak_memory_bytes": 38 * 2**30}
    (root / "metrics.jsonl").write_text("".join(json.dumps(values) + "\n" for values in lines))
    assert report.main([str(root)]) == 0
    first_line = capsys.readouterr().out.splitlines()[0]
    assert ", 103,320 tokens/s, 38.0 GiB, first update 1 min 11 s" in first_line


def test_a_run_before_its_first_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = write_run(tmp_path / "dense", [Launch(0, 0, "killed")], status="running")
    (root / "metrics.jsonl").unlink()
    page = make_page(capsys, tmp_path / "a.html", root)
    assert "dense" in page.text


def test_standalone_evaluations_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = write_run(tmp_path / "dense", WHOLE)
    value = evaluation("standalone", 20, core=0.25)
    (root / "evaluation.json").write_text(json.dumps(value))
    page = make_page(capsys, tmp_path / "a.html", root)
    assert words_of("en")["evaluation_standalone"] in page.text and "25.00" in page.text


def test_all_words_are_used():
    folder = REPORT_WORDS.parent
    code = "".join(path.read_text(encoding="utf-8") for path in [*folder.glob("*.py"), *folder.glob("templates/*")])
    built = ("mode_", "status_", "outcome_", "verdict_", "evaluation_")
    assert [key for key in words_of("en") if not re.search(rf"\b{key}\b", code) and not key.startswith(built)] == []
