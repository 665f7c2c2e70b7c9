"""BPB arithmetic (E1), for evaluation files and records alike."""

import math
from collections.abc import Iterator

from nexttransformer.audit.check import Finding, error
from nexttransformer.evaluation.results import SplitScore

_TOLERANCE = 1e-12


def bpb_of(score: SplitScore) -> float:
    """Returns BPB recomputed from the stored nats and bytes; NaN if they give none."""
    nats = nats_of(score.nats_hex)
    return math.nan if nats is None or score.bytes == 0 else nats / (math.log(2) * score.bytes)


def nats_of(text: str) -> float | None:
    """Returns the number of a `float.hex` text, None if it is none or not finite."""
    try:
        value = float.fromhex(text)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) and value.hex() == text else None


def bpb_problems(score: SplitScore, *, context_tokens: int, where: str) -> Iterator[Finding]:
    """Yields an error for each stored value that does not follow from the others.

    Args:
        score: nats, bytes, counts and bpb of a split (a record's `results.bpb_final` has the same keys).
        context_tokens: targets per row.
        where: place of the score.
    """
    nats = nats_of(score.nats_hex)
    if nats is None:
        yield error("nats_hex is no hexadecimal number.", f"{where}.nats_hex", got=score.nats_hex)
        return
    if nats != score.nats:
        yield error("nats differs from nats_hex.", f"{where}.nats", expected=nats, got=score.nats)
    if not 0 < score.tokens_counted <= score.rows * context_tokens:
        wanted = f"1 to {score.rows * context_tokens}"
        yield error(
            "The number of counted tokens is impossible.",
            f"{where}.tokens_counted",
            expected=wanted,
            got=score.tokens_counted,
        )
    if score.bytes < score.tokens_counted or nats < 0:
        yield error("Bytes and nats are impossible.", f"{where}.bytes", got=score.bytes)
        return
    expected = bpb_of(score)
    if not abs(score.bpb - expected) <= _TOLERANCE * expected:
        yield error("bpb is not nats / (ln 2 x bytes).", f"{where}.bpb", expected=expected, got=score.bpb)
