"""The optional submission file: all that a record holds besides facts of the run."""

import re
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from nexttransformer.training.strict_record import Digest, StrictPart, StrictRecord

# What a name, author or reason may hold: printable text of one line, no markup.
_LINE = re.compile(r"[^\x00-\x1f\x7f<>\u2028\u2029]+")
_URL = re.compile(r"https://[A-Za-z0-9.-]+(?:/[^\s<>\"']*)?")

ShortText = Annotated[str, Field(min_length=1, max_length=120)]
"""One line shown on pages."""


def one_line(value: str) -> str:
    """Returns the text; ValueError unless it is one line without markup and outer spaces."""
    if not _LINE.fullmatch(value) or value != value.strip():
        raise ValueError("expected one line of text without control characters, < or > and outer spaces")
    return value


def _url(value: str) -> str:
    if not _URL.fullmatch(value):
        raise ValueError("expected an https address")
    return value


class Supersedes(StrictPart):
    """The record that this one replaces, by `record_digest`, and why."""

    record_digest: Digest
    reason: ShortText

    _check_reason = field_validator("reason")(one_line)


class Link(StrictPart):
    """A public page: paper, code, weights."""

    title: ShortText
    url: Annotated[str, Field(max_length=300)]

    _check_title = field_validator("title")(one_line)
    _check_url = field_validator("url")(_url)


class Submission(StrictRecord):
    """The file of `--submission`."""

    SCHEMA: ClassVar[str | None] = "nexttransformer.submission/1"

    authors: list[ShortText] = Field(default=[], max_length=50)
    licence: ShortText | None = None
    citation: Annotated[str, Field(max_length=3000)] | None = None
    links: list[Link] = Field(default=[], max_length=20)
    supersedes: Supersedes | None = None

    @field_validator("authors")
    @classmethod
    def _check_authors(cls, authors: list[str]) -> list[str]:
        return [one_line(author) for author in authors]

    @field_validator("licence")
    @classmethod
    def _check_licence(cls, licence: str | None) -> str | None:
        return licence if licence is None else one_line(licence)
