"""The leaderboard command: pages, links, languages, equal bytes, refusals."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nexttransformer import leaderboard
from nexttransformer.board.methods import list_method_texts
from nexttransformer.board.render import WORDS, render_site
from nexttransformer.errors import AuditError, ConfigError
from nexttransformer.models import list_methods
from nexttransformer.registry import MIXERS, RESIDUALS
from nexttransformer.reporting.words import LANGUAGES, words_of
from tests.board.synthetic_records import make_record, write_board, write_record


class Links(HTMLParser):
    """Collects links, ids and the text outside scripts."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.links: list[str] = []
        self.text = ""
        self._skips = 0
        self.feed(content.decode("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if name in ("href", "src") and value]
        self._skips += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._skips -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._skips:
            self.text += " ".join(data.split()) + " "


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return render_site(write_board(tmp_path_factory.mktemp("evidence")))


def test_every_link_leads_somewhere(site: dict[str, bytes]):
    external = set()
    for name, content in site.items():
        if not name.endswith(".html"):
            continue
        for link in Links(content).links:
            if link.startswith(("#", "data:")):
                continue
            if link.startswith("https:"):
                external.add(link)
                continue
            parts = [*Path(name).parent.parts]
            for step in link.partition("#")[0].split("/"):
                parts = parts[:-1] if step == ".." else [*parts, step]
            assert "/".join(parts) in site, f"{name}: {link}"
    # Only what a submitter stated; nothing is loaded from elsewhere.
    assert external == {"https://example.org/paper"}


def test_ranking_page(site: dict[str, bytes]):
    text = Links(site["en/index.html"]).text
    places = [text.index(name) for name in ("Mhc ", "Simple Hc ", "Gdn Hybrid ", "Hc ", "Sssl ", "Dense Full ", "Gdn ")]
    assert places[0] < places[1] < places[2] and places[4] < places[5]
    for shown in ("3\u20134", "5\u20136", "\u22120.0055", "reference", "0.00065", "1.75", "35.33", "1,355.8 M"):
        assert shown in text
    assert "Other tracks, not ranked with the rest" in text and "engram" in text
    assert text.count("not audited here") == 7 + 1
    assert "DEMO" not in text and "2.0431" not in text
    # Relative time on the same GPU; BPB at equal time waits for the ladder.
    assert "1.20 x" in text and "not measured yet" in text


def test_demo_page_is_marked_and_apart(site: dict[str, bytes]):
    page = Links(site["en/demo.html"]).text
    assert "DEMO" in page and "2.0431" in page and "limited" in page and "0.6617" not in page
    method = Links(site["en/demo/methods/mhc_lite.html"]).text
    assert "DEMO" in method and "2.0212" in method
    assert "2.0212" not in Links(site["en/methods/mhc_lite.html"]).text


def test_method_page_has_results_equations_and_evidence(site: dict[str, bytes]):
    text = Links(site["en/methods/mhc.html"]).text
    for shown in ("0.6617", "Sinkhorn", "hellaswag_zeroshot", "30.3 %", "NVIDIA H200", "T5", "A. Author", "Apache-2.0"):
        assert shown in text
    data = re.search(rb'id="chart-data">(.*?)</script>', site["en/methods/mhc.html"])
    assert data is not None
    charts = {chart["id"]: chart for chart in json.loads(data.group(1))}
    assert [line["name"] for line in charts["bpb"]["lines"]] == ["Dense Full", "Mhc"]
    assert charts["bpb"]["lines"][1]["points"][-1] == [46875, 0.6617]
    assert len(charts["core"]["lines"][1]["points"]) == 15


def test_every_registered_method_has_a_page_with_its_mathematics(site: dict[str, bytes]):
    for method in list_methods():
        assert f"en/methods/{method}.html" in site and f"zh/methods/{method}.html" in site
    used = {(part.slot, part.name) for method in list_method_texts() for part in method.parts}
    assert used >= {("mixer", name) for name in MIXERS} | {("residual", name) for name in RESIDUALS}
    for method in list_method_texts():
        assert all("Equations" in part.text or part.slot == "mlp" and part.text for part in method.parts), method


def test_records_and_audits_are_published_unchanged(tmp_path: Path):
    evidence = write_board(tmp_path)
    site = render_site(evidence)
    for folder in ("runs", "audits", "demo/runs", "demo/audits"):
        for path in (evidence / folder).glob("*.json"):
            assert site[f"data/{folder}/{path.name}"] == path.read_bytes()


def test_equal_records_give_equal_bytes_and_no_time(tmp_path: Path, site: dict[str, bytes]):
    assert render_site(write_board(tmp_path)) == site
    year = re.compile(rb"\b20[2-9]\d-\d\d-\d\d\b")
    assert [name for name, content in site.items() if name.endswith(".html") and year.search(content)] == []


def test_chinese_pages_have_no_english_left_over(site: dict[str, bytes]):
    english, chinese = words_of("en", WORDS), words_of("zh", WORDS)
    assert len(LANGUAGES) == 2
    for key, text in english.items():
        assert not hasattr(dict, key)
        assert sorted(re.findall(r"{(\w+)}", text)) == sorted(re.findall(r"{(\w+)}", chinese[key]))
    for name in ("index.html", "demo.html", "compare.html", "methods/mhc.html"):
        page = Links(site[f"zh/{name}"]).text
        left = [text for key, text in english.items() if len(text) > 25 and "{" not in text and text in page]
        assert left == []


def test_all_words_are_used():
    folder = WORDS.parent
    code = "".join(path.read_text(encoding="utf-8") for path in [*folder.glob("*.py"), *folder.glob("templates/*")])
    built = ("slot_", "verdict_")
    unused = [key for key in words_of("en", WORDS) if not re.search(rf"\b{key}\b", code) and not key.startswith(built)]
    assert unused == []


def test_hostile_texts_stay_text(tmp_path: Path):
    # The schema refuses markup in names; a citation is free text.
    record = make_record("mhc", bpb=0.6617, citation="</script><script>alert(1)</script>", display_name='a" onclick="b')
    write_record(tmp_path, record)
    for name, content in render_site(tmp_path).items():
        if name.endswith(".html"):
            assert b"<script>alert" not in content and b'a" onclick' not in content
    write_record(tmp_path, {**record, "links": [{"title": "x", "url": "javascript:alert(1)"}]})
    with pytest.raises(AuditError, match="https address"):
        render_site(tmp_path)


def test_waivers_and_replacements_are_shown(tmp_path: Path):
    record = make_record("mhc", bpb=0.6617, supersedes={"record_digest": "0" * 64, "reason": "wrong name"})
    write_record(tmp_path, record)
    waiver = {
        "run_digest": record["digests"]["run"],
        "check": "P5",
        "reason": "new torch",
        "reviewer": "R",
        "issue": "1",
    }
    (tmp_path / "waivers.json").write_text(json.dumps({"schema": "nexttransformer.waivers/1", "waivers": [waiver]}))
    text = Links(render_site(tmp_path)["en/methods/mhc.html"]).text
    assert "Waived P5: new torch (R)" in text and "wrong name" in text
    (tmp_path / "waivers.json").write_text(
        json.dumps({"schema": "nexttransformer.waivers/1", "waivers": [{**waiver, "check": "K1"}]})
    )
    with pytest.raises(AuditError, match="K1 is never waived"):
        render_site(tmp_path)
    (tmp_path / "waivers.json").write_text(json.dumps([waiver]))
    with pytest.raises(AuditError, match="expected a JSON object"):
        render_site(tmp_path)


def test_command_writes_checks_and_cleans(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    evidence, output = write_board(tmp_path / "evidence"), tmp_path / "site"
    words = ["--evidence", str(evidence), "--output", str(output)]
    assert leaderboard.main(words) == 0
    assert leaderboard.main([*words, "--check"]) == 0
    (output / "CNAME").write_text("example.org")
    (output / "en/index.html").write_bytes(b"edited by hand")
    assert leaderboard.main([*words, "--check"]) == 1
    assert "en/index.html: differs" in capsys.readouterr().out
    (evidence / "runs/gdn.json").unlink()
    assert leaderboard.main(words) == 0
    assert not (output / "data/runs/gdn.json").exists() and (output / "CNAME").exists()
    assert leaderboard.main([*words, "--check"]) == 0
    (output / "files.json").write_text('["../evidence/runs/mhc.json", 3]')
    assert leaderboard.main(words) == 0 and (evidence / "runs/mhc.json").exists()


def test_command_refuses(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such folder"):
        leaderboard.main(["--evidence", str(tmp_path / "absent")])
    write_record(tmp_path / "evidence", make_record("mhc", bpb=0.6), verdict="cannot_judge")
    with pytest.raises(AuditError, match="cannot_judge"):
        leaderboard.main(["--evidence", str(tmp_path / "evidence"), "--output", str(tmp_path / "site")])
    assert not (tmp_path / "site").exists()


def test_empty_board_shows_what_is_published_elsewhere(tmp_path: Path):
    text = Links(render_site(tmp_path)["en/index.html"]).text
    assert "No audited record yet" in text and "0.6617" in text and "not audited here" in text
