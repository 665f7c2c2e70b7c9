"""What a check reports: one line with the figure, the rule or check it belongs to, and what to do."""

import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

# What a faulty part can raise. Anything else is not the part's fault and keeps its traceback.
PART_ERRORS = (
    ValueError,
    TypeError,
    RuntimeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
)


@dataclass(frozen=True)
class Finding:
    """One result of a check that needs attention.

    Attributes:
        rule: "B1" to "B5" (the budget rules) or the check's name.
        message: what is wrong with its figure, what was expected, what to do.
        is_refusal: whether the method fails by it; otherwise it is a note.
    """

    rule: str
    message: str
    is_refusal: bool = True

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


def refusals(findings: list[Finding]) -> list[Finding]:
    """Returns the findings that refuse a method."""
    return [finding for finding in findings if finding.is_refusal]


def describe_crash(what: str, error: BaseException) -> Finding:
    """Returns the finding "crash" for an exception that a part raised.

    Args:
        what: what was attempted ("building the model").
        error: the exception; the innermost line outside torch and the counter is named.
    """
    torch_folder = Path(str(torch.__file__)).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if torch_folder not in Path(frame.filename).parents
        and not frame.filename.startswith("<")
        and frame.name != "__torch_dispatch__"
    ]
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    text = " ".join(str(error).split())
    return Finding("crash", f"{what} raised {type(error).__name__}: {text[:300]}{place}. Fix the part, then repeat.")
