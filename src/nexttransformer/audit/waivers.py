"""`evidence/waivers.json`: findings of single runs that maintainers let pass. The one reader of that file."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from nexttransformer import provenance
from nexttransformer.audit import reader
from nexttransformer.audit.code_reference import git_output
from nexttransformer.audit.rules import RUN_RULE_IDS
from nexttransformer.errors import AuditError
from nexttransformer.training.strict_record import Digest, StrictPart, StrictRecord

WAIVERS_PATH = "evidence/waivers.json"
_REGULAR_MODES = ("100644", "100755")


class Waiver(StrictPart):
    """One check of one run whose findings do not refuse. `issue` is a number or address of the discussion."""

    run_digest: Digest
    check: str
    reason: Annotated[str, Field(min_length=1)]
    reviewer: Annotated[str, Field(min_length=1)]
    issue: Annotated[str, Field(min_length=1)]


class WaiversFile(StrictRecord):
    """The whole file."""

    SCHEMA: ClassVar[str | None] = "nexttransformer.waivers/1"

    waivers: list[Waiver]


def parse_waivers(content: bytes) -> list[Waiver]:
    """Returns the waivers that a file's content holds.

    Raises:
        Malformed: one line with all problems, without the file's name.
    """
    record, problems = WaiversFile.problems_of(reader.parse_json(content), "")
    if isinstance(record, WaiversFile):
        problems = [
            f"waivers.{number}.check: '{waiver.check}' is none of the {len(RUN_RULE_IDS)} checks."
            for number, waiver in enumerate(record.waivers)
            if waiver.check not in RUN_RULE_IDS
        ]
        if not problems:
            return record.waivers
    raise reader.Malformed(" ".join(" ".join(problem.removeprefix(": ").split()) for problem in problems))


def committed_waivers(run: Path) -> list[Waiver]:
    """Returns the waivers that HEAD of the project's repository holds; none where there is no repository or no file.

    The repository is the one that holds the package, else the one around the current folder. An edit that is
    not committed, and whatever lies in the run folder, is never read.

    Args:
        run: the run folder.

    Raises:
        AuditError: the committed file is damaged.
    """
    root = provenance.repository() or _repository_around(Path.cwd())
    if root is None or (root / WAIVERS_PATH).resolve().is_relative_to(run.resolve()):
        return []
    listed = git_output(root, "ls-tree", "-l", "-z", "--full-tree", "HEAD", "--", WAIVERS_PATH)
    if not listed:
        return []
    try:
        return parse_waivers(_blob(root, listed))
    except reader.Malformed as problem:
        raise AuditError(
            f"{WAIVERS_PATH} as committed in {root}: {problem} Repair and commit it, then audit again."
        ) from None


def _blob(root: Path, listed: bytes) -> bytes:
    """Returns the content of the one file that a line of `ls-tree -l` names."""
    mode, _, object_id, size = listed.partition(b"\t")[0].decode("ascii").split()
    if mode not in _REGULAR_MODES:
        raise reader.Malformed("is no regular file.")
    if int(size) > reader.MAX_JSON_BYTES:
        raise reader.Malformed(f"is longer than {reader.MAX_JSON_BYTES:,} bytes.")
    content = git_output(root, "cat-file", "blob", object_id)
    if content is None:
        raise reader.Malformed("cannot be read by git.")
    return content


def _repository_around(folder: Path) -> Path | None:
    found = git_output(folder, "rev-parse", "--show-toplevel")
    return Path(found.decode("utf-8", "surrogateescape").rstrip("\n")) if found else None
