"""`evidence/waivers.json`: what maintainers waived. Only the merge base's copy counts."""

from typing import Annotated, ClassVar

from pydantic import Field

from nexttransformer.audit.check import Needs
from nexttransformer.audit.reader import Malformed
from nexttransformer.submission.subject import EVIDENCE, Subject
from nexttransformer.training.strict_record import Digest, StrictPart, StrictRecord

WAIVERS_PATH = f"{EVIDENCE}waivers.json"


class Waiver(StrictPart):
    """One finding of one run that does not refuse. `issue` is a number or address of the discussion."""

    run_digest: Digest
    check: str
    reason: Annotated[str, Field(min_length=1)]
    reviewer: Annotated[str, Field(min_length=1)]
    issue: Annotated[str, Field(min_length=1)]


class WaiversFile(StrictRecord):
    """The whole file."""

    SCHEMA: ClassVar[str | None] = "nexttransformer.waivers/1"

    waivers: list[Waiver]


def load_waivers(subject: Subject) -> list[Waiver]:
    """Returns the merge base's waivers; Needs if that file is damaged."""
    try:
        value = subject.json_at_base(WAIVERS_PATH)
    except Malformed as problem:
        raise Needs(f"Needs the merge base's waivers, and the file {problem}", WAIVERS_PATH) from None
    if value is None:
        return []
    record, problems = WaiversFile.problems_of(value, "")
    if not isinstance(record, WaiversFile):
        raise Needs(f"Needs the merge base's waivers: {problems[0].removeprefix(': ')}", WAIVERS_PATH)
    return record.waivers
