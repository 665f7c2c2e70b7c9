"""Records to pages: a dictionary of file name -> bytes, a pure function of the evidence and this package."""

from pathlib import Path
from typing import Any

from nexttransformer import jsonio
from nexttransformer.board import method_page, tables
from nexttransformer.board.compare import compare_data
from nexttransformer.board.methods import MethodText, list_method_texts
from nexttransformer.board.rank import rank_by_bpb, rank_by_time, reference_of
from nexttransformer.board.records import DEMO, FOLDERS, FORMAL, Evidence, Record, read_evidence
from nexttransformer.protocol import FORMAL_V1
from nexttransformer.reporting import noise
from nexttransformer.reporting.page import TEMPLATES as SHARED_TEMPLATES
from nexttransformer.reporting.page import environment, script_json
from nexttransformer.reporting.words import LANGUAGES, words_of

TEMPLATES = Path(__file__).parent / "templates"
WORDS = Path(__file__).parent / "words.json"
LISTING = "files.json"
_PUBLISHED = Path(__file__).parent / "published.json"


def render_site(evidence_folder: Path) -> dict[str, bytes]:
    """Returns every file of the site: path relative to its folder -> content. Equal records give equal bytes.

    Raises:
        AuditError: naming every record that cannot be shown.
    """
    evidence = read_evidence(evidence_folder)
    methods = list_method_texts()
    files: dict[str, bytes] = {
        "index.html": _page("root.html", languages=[words_of(each, WORDS) for each in LANGUAGES])
    }
    for language in LANGUAGES:
        files |= _language_pages(language, evidence, methods)
    for division, records in evidence.records.items():
        for record in records:
            files[f"data/{FOLDERS[division]}runs/{record.method}.json"] = record.content
            files[f"data/{FOLDERS[division]}audits/{record.method}.json"] = record.audit_content
    for method in methods:
        files[f"data/configs/{method.family}/{method.method}.json"] = method.config.encode("utf-8")
    style = (SHARED_TEMPLATES / "base.css").read_text(encoding="utf-8")
    files["assets/style.css"] = (style + (TEMPLATES / "board.css").read_text(encoding="utf-8")).encode("utf-8")
    files["assets/theme.js"] = (SHARED_TEMPLATES / "theme.js").read_bytes()
    for name in ("tables.js", "charts.js", "compare.js"):
        files[f"assets/{name}"] = (TEMPLATES / name).read_bytes()
    files[LISTING] = jsonio.pretty_bytes(sorted(files))
    return dict(sorted(files.items()))


def _page(template: str, /, **values: Any) -> bytes:
    return environment(TEMPLATES).get_template(template).render(**values).encode("utf-8")


def _language_pages(language: str, evidence: Evidence, methods: list[MethodText]) -> dict[str, bytes]:
    words = words_of(language, WORDS)
    other = next(each for each in LANGUAGES if each != language)
    texts = {method.method: method for method in methods}
    published = jsonio.read_json(_PUBLISHED)

    def page(template: str, name: str, /, **values: Any) -> dict[str, bytes]:
        """Renders one page; `root` leads from it to the site's top."""
        root = "../" * (name.count("/") + 1)
        common = {"w": words, "language": language, "root": root, "here": name, "other_language": other}
        return {f"{language}/{name}": _page(template, **common, **values)}

    files: dict[str, bytes] = {}
    for division, name in ((FORMAL, "index.html"), (DEMO, "demo.html")):
        records = evidence.records[division]
        files |= page(
            "board.html",
            name,
            division=division,
            folder=FOLDERS[division],
            rows=tables.ranking_rows(rank_by_bpb(records), division, texts, words),
            others=tables.other_rows(records, texts, words),
            families=tables.family_rows(records, words),
            timed=tables.time_rows(rank_by_time(records, evidence.beta_bpb)),
            beta=evidence.beta_bpb,
            published=tables.published_rows(published, texts) if division == FORMAL else [],
            source=published["source"],
            open_methods=_without_result(methods, evidence) if division == FORMAL else {},
            protocol=FORMAL_V1,
            bpb_band=f"{noise.BPB_BAND:.2g}",
            core_band=f"{100 * noise.CORE_BAND:.2f}",
        )
        for record in records:
            files |= page(
                "method.html",
                f"{FOLDERS[division]}methods/{record.method}.html",
                **_method_values(record, records, texts.get(record.method), evidence, words),
            )
    formal = {record.method for record in evidence.records[FORMAL]}
    for method in methods:
        if method.method not in formal:
            files |= page(
                "method.html",
                f"methods/{method.method}.html",
                division=FORMAL,
                folder="",
                record=None,
                text=method,
                method=method.method,
                family=method.family,
                name=method.name,
            )
    files |= page(
        "compare.html",
        "compare.html",
        data=script_json(compare_data(evidence.records[FORMAL], published, words)),
        num_records=len(evidence.records[FORMAL]) + len(published["results"]),
    )
    return files


def _without_result(methods: list[MethodText], evidence: Evidence) -> dict[str, list[MethodText]]:
    formal = {record.method for record in evidence.records[FORMAL]}
    families: dict[str, list[MethodText]] = {}
    for method in methods:
        if method.method not in formal:
            families.setdefault(method.family, []).append(method)
    return families


def _method_values(
    record: Record, records: list[Record], text: MethodText | None, evidence: Evidence, words: dict[str, str]
) -> dict[str, Any]:
    ranked = {row.record.method: row for row in rank_by_bpb(records)}
    row = ranked.get(record.method)
    reference = reference_of(records)
    return {
        "division": record.division,
        "folder": FOLDERS[record.division],
        "record": record,
        "text": text,
        "method": record.method,
        "family": record.family,
        "name": record.name,
        "cards": method_page.method_cards(record, row, words),
        "charts": script_json(method_page.method_charts(record, reference, words)),
        "facts": method_page.training_facts(record, words),
        "attempts": method_page.attempt_rows(record),
        "digests": method_page.digest_rows(record),
        "audit": method_page.audit_facts(record, evidence.waivers, words),
        "credits": method_page.credit_rows(record, words),
        "tasks": method_page.task_rows(record),
        "links": record.facts.links,
    }
