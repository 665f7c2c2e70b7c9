"""Text that must not be published: paths, addresses, user names, tokens. Used by checks and to mask values."""

import re
from collections.abc import Iterator
from typing import Any

_PATTERNS = {
    "absolute path": re.compile(
        r"(?<![\w.:/-])(?:/(?!/)[\w.@~+-]+){2,}/?|(?<![\w.:/-])/(?:home|root|tmp|Users|mnt|data)\b"
    ),
    "home folder": re.compile(r"(?<![\w.])~[\w-]*/[\w.-]+"),
    "absolute path on Windows": re.compile(r"(?<![A-Za-z])[A-Za-z]:\\[^\s\\]|\\\\[\w.-]+\\"),
    "mail address": re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    "network address": re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"),
    "host name": re.compile(r"\b[\w-]+\.(?:local|internal|lan|corp|cluster)\b"),
    "access token": re.compile(
        r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|sk-[\w-]{16,}|AKIA[0-9A-Z]{12,}"
        r"|xox[abprs]-[\w-]{10,}|glpat-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,})"
    ),
}
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>]+")


def private_kinds(text: str, *, allows_urls: bool = False) -> list[str]:
    """Returns what kinds of private text a string holds; empty if none.

    Args:
        text: any string.
        allows_urls: whether public web addresses may stand in it (links, citations); others never.
    """
    rest = text
    if allows_urls:
        rest = _URL.sub(" ", text)
    found = [kind for kind, pattern in _PATTERNS.items() if pattern.search(rest)]
    return [*found, "web address"] if _URL.search(rest) else found


def find_private(value: Any, *, path: str = "", url_keys: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """Yields (key path, kind) for every private text among the keys and strings of a JSON value.

    Args:
        value: parsed JSON.
        path: key path of the value.
        url_keys: top-level keys under which web addresses may stand.
    """
    if isinstance(value, str):
        allows_urls = path.split(".")[0].split("[")[0] in url_keys
        for kind in private_kinds(value, allows_urls=allows_urls):
            yield path, kind
    elif isinstance(value, dict):
        for key, item in value.items():
            for kind in private_kinds(key):
                yield path or "(keys)", kind
            yield from find_private(item, path=f"{path}.{key}" if path else key, url_keys=url_keys)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from find_private(item, path=f"{path}[{index}]", url_keys=url_keys)


def mask(text: str) -> str:
    """Returns a text with everything private replaced, so that it may stand in a published audit."""
    for kind, pattern in {**_PATTERNS, "web address": _URL}.items():
        text = pattern.sub(f"({kind} withheld)", text)
    return text
