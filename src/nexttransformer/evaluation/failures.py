"""How an exception becomes one line inside a result."""

import traceback

from nexttransformer.errors import NextTransformerError


def describe(problem: Exception) -> str:
    """Returns one line for a result's `error`: our own messages as they are, others with type and place."""
    if isinstance(problem, NextTransformerError):
        return str(problem)
    frame = traceback.extract_tb(problem.__traceback__)[-1]
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text[:300]} (in {frame.name}, line {frame.lineno})"
