"""R1 to R3: which files change, which published numbers, and whether the pages follow from the records."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from nexttransformer.audit.check import Finding, Needs, check, error
from nexttransformer.audit.reader import MAX_JSON_BYTES
from nexttransformer.audit.rules import REQUEST
from nexttransformer.board.render import render_site
from nexttransformer.errors import AuditError
from nexttransformer.export.replacing import Change, changes
from nexttransformer.submission.git_tree import Entry
from nexttransformer.submission.subject import EVIDENCE, SITE, Subject


@check("R1", stage=REQUEST)
def check_paths(subject: Subject) -> Iterator[Finding]:
    """Only the two evidence files of one method, and pages."""
    allowed = {subject.record_path(), subject.audit_path}
    for path in subject.changed:
        if path in allowed:
            if path not in subject.after:
                yield error("A published evidence file is removed.", path)
        elif not path.startswith(SITE):
            expected = f"{subject.record_path()}, {subject.audit_path} and pages"
            yield error("This file may not change here.", path, expected=expected)
    for path in sorted(allowed):
        if path not in subject.after and path not in subject.before:
            yield error("One of the two evidence files is missing.", path)


def published_changes(subject: Subject) -> list[Change]:
    """Returns the published numbers that the request changes; Needs if a record cannot be used."""
    old = subject.old_record_file
    return [] if old is None else changes(old.cell.get(), subject.record)


@check("R2", stage=REQUEST)
def check_numbers(subject: Subject) -> Iterator[Finding]:
    """Changed numbers need `supersedes` with the old record's digest."""
    where = f"{subject.record_path()} supersedes"
    old_file, named = subject.old_record_file, subject.record.supersedes
    if old_file is None:
        if named is not None:
            yield error("It names a record, and the merge base has none.", where, got=named.record_digest)
        return
    old = old_file.cell.get()
    if named is not None:
        # A record may be merged again as it is; then it names the one before it still.
        if named.record_digest != old.record_digest and named != old.supersedes:
            expected = old.record_digest
            yield error(
                "It names another record than the published one.", where, expected=expected, got=named.record_digest
            )
        if named.record_digest == old.record_digest:
            return
    for change in published_changes(subject):
        yield error(
            "A published number changes and no superseded record is named.",
            f"{subject.record_path()} {change.name}",
            expected=change.old,
            got=change.new,
        )
    if old.run_id != subject.record.run_id:
        yield error(
            "The record is of another run and names no superseded record.",
            f"{subject.record_path()} run_id",
            expected=old.run_id,
            got=subject.record.run_id,
        )


@check("R3", stage=REQUEST)
def check_pages(subject: Subject) -> Iterator[Finding]:
    """The committed pages are those of the merge base or those of this request's records."""
    pages = {path: entry for path, entry in subject.after.items() if path.startswith(SITE)}
    touched = [path for path in subject.changed if path.startswith(SITE)]
    if not touched:
        return
    wrong: dict[str, str] = {}
    for tree in (subject.after, subject.before):
        wrong = _page_problems(subject, pages, touched, tree)
        if not wrong:
            return
    # The last comparison was with the merge base; the request's own records are the ones to build from.
    for path, problem in sorted(_page_problems(subject, pages, touched, subject.after).items()):
        yield error(f"The page {problem}: pages are built by the leaderboard command, or left alone.", path)


def _page_problems(
    subject: Subject, pages: dict[str, Entry], touched: list[str], tree: dict[str, Entry]
) -> dict[str, str]:
    """Returns path -> what is wrong with a page, compared with those built from a commit's evidence."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "evidence"
        folder.mkdir()
        for path, entry in tree.items():
            is_usable = entry.is_regular and entry.num_bytes <= MAX_JSON_BYTES and ".." not in path.split("/")
            if path.startswith(EVIDENCE) and is_usable:
                target = Path(temporary) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(subject.repository.content(entry))
        try:
            built = {f"{SITE}{name}": content for name, content in render_site(folder).items()}
        except AuditError:
            raise Needs("Needs pages built from the records, which cannot be shown; see L4.", EVIDENCE) from None
    problems = {}
    for path, content in built.items():
        if path not in pages:
            problems[path] = "is missing"
        elif not pages[path].is_regular or not subject.repository.is_content(pages[path], content):
            problems[path] = "differs"
    return problems | {path: "belongs to no record" for path in touched if path in pages and path not in built}
