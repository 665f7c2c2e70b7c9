"""One pull request: its changes against the merge base, its record and its audit."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from nexttransformer.audit import reader
from nexttransformer.audit.cell import Cell
from nexttransformer.audit.check import Needs
from nexttransformer.audit.reference import DEMO_PROTOCOLS
from nexttransformer.audit.report import AuditRecord
from nexttransformer.audit.waivers import WAIVERS_PATH, Waiver, parse_waivers
from nexttransformer.errors import ConfigError
from nexttransformer.export.record import Division, Record
from nexttransformer.protocol import FORMAL_V1, PROTOCOLS, Protocol
from nexttransformer.submission.git_tree import Entry, GitRepository
from nexttransformer.training.strict_record import StrictRecord

EVIDENCE, SITE = "evidence/", "site/"
FOLDERS: dict[Division, str] = {"formal": EVIDENCE, "demo": f"{EVIDENCE}demo/"}
_EVIDENCE_FILE = re.compile(r"(evidence/|evidence/demo/)(runs|audits)/([^/]+)\.json")
SchemaType = TypeVar("SchemaType", bound=StrictRecord)


@dataclass(frozen=True)
class EvidenceFile:
    """A file of the request: its bytes and parsed form, or the problems that L4 reports."""

    path: str
    content: bytes
    problems: list[str]
    cell: Cell


@dataclass
class Subject:
    """What the checks look at.

    Attributes:
        repository: of the request.
        base, head: commits; base is the merge base.
        division: `formal` or `demo`.
        before, after: path -> entry of both.
        target: path -> entry of the branch to merge into, as it is now.
        method: the one method whose evidence changes.
    """

    repository: GitRepository
    base: str
    head: str
    division: Division
    before: dict[str, Entry] = field(default_factory=dict)
    after: dict[str, Entry] = field(default_factory=dict)
    target: dict[str, Entry] = field(default_factory=dict)
    method: str = ""

    @classmethod
    def open(cls, repository: GitRepository, *, base: str, head: str, division: Division) -> "Subject":
        """Reads both commits.

        Raises:
            ConfigError: a commit is missing, or no file of evidence/ changes.
        """
        head_commit, base_commit = repository.resolve(head), repository.resolve(base)
        merge_base = repository.merge_base(base_commit, head_commit)
        subject = cls(repository, merge_base, head_commit, division)
        subject.before, subject.after = repository.tree(merge_base), repository.tree(head_commit)
        subject.target = repository.tree(base_commit)
        methods = subject.changed_methods
        if not methods:
            folder = FOLDERS[division]
            raise ConfigError(
                f"Nothing to judge: {head} changes no file of {EVIDENCE} since it left {base} (merge base "
                f"{merge_base[:12]}). Commit {folder}runs/ID.json and {folder}audits/ID.json first."
            )
        # With several, R1 refuses; the rest looks at the first one whose files are there.
        subject.method = next((name for name in methods if subject.has_both(name)), methods[0])
        return subject

    def has_both(self, method: str) -> bool:
        """Says whether the request holds record and audit of a method as regular files."""
        entries = [self.after.get(path) for path in (self.record_path(method), self.audit_path_of(method))]
        return all(entry is not None and entry.is_regular for entry in entries)

    @cached_property
    def changed(self) -> list[str]:
        """Paths that were added, removed or changed, sorted."""
        both = {*self.before, *self.after}
        return sorted(path for path in both if self.before.get(path) != self.after.get(path))

    @property
    def changed_methods(self) -> list[str]:
        """File stems of the changed evidence files: the division's, else any (R1 then refuses them)."""
        changed = [path for path in self.changed if path.startswith(EVIDENCE)]
        matches = [match for path in changed if (match := _EVIDENCE_FILE.fullmatch(path))]
        own = {match[3] for match in matches if match[1] == FOLDERS[self.division]}
        return sorted(own or {match[3] for match in matches} or {Path(path).stem for path in changed})

    def record_path(self, method: str | None = None) -> str:
        """Returns where a method's record is."""
        return f"{FOLDERS[self.division]}runs/{method or self.method}.json"

    def audit_path_of(self, method: str) -> str:
        """Returns where a method's audit is."""
        return f"{FOLDERS[self.division]}audits/{method}.json"

    @property
    def audit_path(self) -> str:
        """Where the method's audit is."""
        return self.audit_path_of(self.method)

    @property
    def protocols(self) -> list[Protocol]:
        """The division's protocols."""
        return [FORMAL_V1] if self.division == "formal" else [PROTOCOLS[name] for name in DEMO_PROTOCOLS]

    @cached_property
    def record_file(self) -> EvidenceFile:
        """The request's record."""
        return self._read(self.after, self.record_path(), Record)

    @cached_property
    def audit_file(self) -> EvidenceFile:
        """The request's audit."""
        return self._read(self.after, self.audit_path, AuditRecord)

    @cached_property
    def old_record_file(self) -> EvidenceFile | None:
        """The record of the same method at the merge base; None if there was none."""
        return self._read(self.before, self.record_path(), Record) if self.record_path() in self.before else None

    @property
    def record(self) -> Record:
        """The record; Needs if it cannot be used."""
        return self.record_file.cell.get()

    @property
    def audit(self) -> AuditRecord:
        """The audit; Needs if it cannot be used."""
        return self.audit_file.cell.get()

    def other_records(self) -> list[tuple[str, Record]]:
        """Returns all other published records of both divisions, as far as they are readable."""
        found = []
        for path in sorted(self.target):
            match = _EVIDENCE_FILE.fullmatch(path)
            if match and match[2] == "runs" and path != self.record_path():
                record = self._read(self.target, path, Record).cell.value
                if record is not None:
                    found.append((path, record))
        return found

    @cached_property
    def waivers(self) -> list[Waiver]:
        """What maintainers waived, by the merge base's copy alone; Needs if that file is damaged."""
        entry = self.before.get(WAIVERS_PATH)
        try:
            return [] if entry is None else parse_waivers(self._content(entry))
        except reader.Malformed as problem:
            raise Needs(f"Needs the merge base's waivers, and the file is damaged: {problem}", WAIVERS_PATH) from None

    def _read(self, tree: dict[str, Entry], path: str, schema: type[SchemaType]) -> EvidenceFile:
        if path not in tree:
            return EvidenceFile(path, b"", ["The file is missing."], Cell(path, None, "L4"))
        content = b""
        try:
            content = self._content(tree[path])
            value = reader.parse_json(content)
        except reader.Malformed as problem:
            return EvidenceFile(path, content, [f"The file {problem}"], Cell(path, None, "L4"))
        record, problems = schema.problems_of(value, "")
        texts = [problem.removeprefix(": ") for problem in problems]
        return EvidenceFile(path, content, texts, Cell(path, record, "L4"))

    def _content(self, entry: Entry) -> bytes:
        if not entry.is_regular:
            raise reader.Malformed("is no regular file.")
        if entry.num_bytes > reader.MAX_JSON_BYTES:
            raise reader.Malformed(f"is longer than {reader.MAX_JSON_BYTES:,} bytes.")
        return self.repository.content(entry)
