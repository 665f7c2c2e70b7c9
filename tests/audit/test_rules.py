"""The ids: code, both rule pages and the registered checks hold the same set."""

import re
from pathlib import Path

import pytest

from nexttransformer.audit import report
from nexttransformer.audit.check import registered
from nexttransformer.audit.private_text import find_private, mask, private_kinds
from nexttransformer.audit.rules import AUDIT, HUMAN_RULES, NEVER_WAIVED, RULES, RUN_RULE_IDS

ROOT = Path(__file__).parents[2]
PAGES = {language: ROOT / f"docs/{language}/rules.md" for language in ("en", "zh")}
ROW = re.compile(r"^\| ([LPCDMTNEKRH]\d) \|(.*)\|$", re.MULTILINE)


def test_there_are_45_and_3_and_6() -> None:
    counts = {letter: sum(rule_id[0] == letter for rule_id in RUN_RULE_IDS) for letter in "LPCDMTNEK"}
    assert counts == {"L": 5, "P": 6, "C": 7, "D": 4, "M": 6, "T": 5, "N": 3, "E": 5, "K": 4}
    assert len(RUN_RULE_IDS) == 45 and set(RULES) - set(RUN_RULE_IDS) == {"R1", "R2", "R3"}
    assert list(HUMAN_RULES) == [f"H{number}" for number in range(1, 7)]
    assert set(RUN_RULE_IDS) > NEVER_WAIVED


def test_every_rule_of_the_audit_is_registered() -> None:
    assert len(report.TOPICS) == 11
    assert set(registered(AUDIT)) == {rule_id for rule_id, rule in RULES.items() if AUDIT in rule.stages}


@pytest.mark.parametrize("language", PAGES)
def test_pages_have_the_same_ids(language: str) -> None:
    rows = ROW.findall(PAGES[language].read_text(encoding="utf-8"))
    assert [rule_id for rule_id, _ in rows] == [*RULES, *HUMAN_RULES]
    for rule_id, cells in rows:
        if rule_id in RULES:
            rule = RULES[rule_id]
            severities, stages = (cell.strip() for cell in cells.split("|")[:2])
            assert severities == ", ".join(rule.severities), rule_id
            assert stages == " ".join(rule.stages), rule_id


def test_the_english_page_has_the_texts_word_for_word() -> None:
    rows = dict(ROW.findall(PAGES["en"].read_text(encoding="utf-8")))
    for rule_id, text in {**{key: rule.text for key, rule in RULES.items()}, **HUMAN_RULES}.items():
        assert rows[rule_id].split("|")[-1].strip() == text, rule_id


@pytest.mark.parametrize(
    "text",
    [
        "/home/x/run",
        "saved in /tmp/abc",
        "~/runs/a",
        "C:\\Users\\x",
        "\\\\server\\share",
        "me@example.org",
        "10.0.0.12",
        "node17.cluster",
        "hf_abcdefghijklmnopqrst",
        "ghp_0123456789abcdefghij",
        "https://example.org/x",
    ],
)
def test_private_text(text: str) -> None:
    assert private_kinds(text) and mask(text) != text and not private_kinds(mask(text))
    assert list(find_private({"a": [{"b": f"see {text}"}]})) == [("a[0].b", kind) for kind in private_kinds(text)]


@pytest.mark.parametrize(
    "text", ["NVIDIA H200", "570.86.15", "2.13.0+cu130", "n/a", "1/2", "gated_gdn_hybrid", "bf16/fp32", "a: b", ""]
)
def test_public_text(text: str) -> None:
    assert private_kinds(text) == [] and mask(text) == text


def test_web_addresses_only_where_they_belong() -> None:
    value = {"links": {"code": "https://example.org/a/b"}, "name": "https://example.org/a/b"}
    assert [path for path, _ in find_private(value, url_keys=frozenset({"links"}))] == ["name"]
