"""Behaviour of a tiny copy with random weights: no look ahead, rows and passes independent, every parameter trained.

Each check returns findings with the largest deviation and the first layer that shows it. float32 on the CPU, where
equal shapes give equal bits.
"""

from collections.abc import Callable

from nexttransformer.checking.findings import PART_ERRORS, Finding, describe_crash
from nexttransformer.checking.gradients import check_gradients
from nexttransformer.checking.numerics import check_bfloat16, check_determinism, check_start
from nexttransformer.checking.sequence import (
    check_batch_independence,
    check_causality,
    check_prefixes,
    check_state_passing,
)
from nexttransformer.checking.subject import Subject, traced
from nexttransformer.checking.tiny import build_randomized, random_ids, tiny_copy
from nexttransformer.config import ModelConfig

_CHECKS: dict[str, Callable[[Subject], list[Finding]]] = {
    "the pass with later tokens changed": check_causality,
    "the pass of single rows": check_batch_independence,
    "the pass of short prefixes": check_prefixes,
    "feeding in parts": check_state_passing,
    "the bfloat16 pass with state": check_bfloat16,
    "the repeated pass": check_determinism,
    "the pass at the initial weights": check_start,
    "the backward pass": lambda subject: check_gradients(subject.config),
}


def check_behaviour(config: ModelConfig) -> list[Finding]:
    """Checks a tiny copy of a configuration at its own initial weights and with random ones.

    Returns:
        One finding per violated property; a part that raises gives the finding "crash".
    """
    tiny = tiny_copy(config)
    try:
        model = build_randomized(tiny)
    except PART_ERRORS as error:
        return [describe_crash("building a tiny copy", error)]
    findings: dict[Finding, None] = {}
    # A step-dependent part must hold everywhere: before, within and at the end of a run.
    for update in (0, 1000, 1_000_000) if model.is_update_dependent else (0,):
        model.set_step(update)
        ids_BT = random_ids(tiny, rows=2)
        try:
            subject = Subject(tiny, model, ids_BT, *traced(model, ids_BT))
        except PART_ERRORS as error:
            return [describe_crash("a forward pass", error)]
        for what, check in _CHECKS.items():
            try:
                findings.update(dict.fromkeys(check(subject)))
            except PART_ERRORS as error:
                findings[describe_crash(what, error)] = None
    return list(findings)
