"""M1 to M6: sizes, cost and tensors of the model, and how a tiny copy of it behaves."""

from collections.abc import Iterator

from nexttransformer.audit.cell import guarded
from nexttransformer.audit.check import Finding, Needs, check, differs, error, warning
from nexttransformer.audit.model_behaviour import Behaviour, behaviour, execution_problems
from nexttransformer.audit.run_view import RunView
from nexttransformer.models.budget import reference_budget


@check("M1")
def check_counts(view: RunView) -> Iterator[Finding]:
    """Parameter counts three ways."""
    budget = view.facts.budget

    def recorded() -> Iterator[Finding]:
        found = view.run.get().model
        for key in ("num_parameters", "num_lookup", "num_matmul"):
            yield from differs(
                f"{key}", f"run.json model.{key}", expected=getattr(budget, key), got=getattr(found, key)
            )

    def saved() -> Iterator[Finding]:
        cell = view.newest.header
        assert cell is not None
        total = sum(entry.num_elements for entry in cell.get().tensors.values())
        yield from differs("The number of saved parameters", cell.where, expected=budget.num_parameters, got=total)

    yield from guarded({"recorded": recorded, "saved": saved})


@check("M2")
def check_flops(view: RunView) -> Iterator[Finding]:
    """Training FLOPs per token: recorded, within the budget, and what a pass really executes."""
    protocol, facts = view.reference.protocol, view.facts
    cost = facts.budget.training_flops_per_token
    reference = reference_budget(protocol).training_flops_per_token
    deviation = cost / reference - 1
    if not abs(deviation) <= protocol.budget_tolerance:
        yield error(
            "Training FLOPs per token are outside the budget.",
            "run.json config",
            expected=f"{reference:.0f} within {protocol.budget_tolerance:.1%}",
            got=f"{cost:.0f} ({deviation:+.2%})",
        )
    for problem in execution_problems(view.config):
        yield error(f"Executed and declared cost differ: {problem}", "run.json config")
    recorded = view.run.get().model.training_flops_per_token
    yield from differs(
        "Training FLOPs per token", "run.json model.training_flops_per_token", expected=round(cost), got=recorded
    )


@check("M3")
def check_tensors(view: RunView) -> Iterator[Finding]:
    """Tensors of the final checkpoint."""
    facts = view.facts

    def recorded() -> Iterator[Finding]:
        got = view.run.get().model.tensors_digest
        yield from differs(
            "The digest of the tensors", "run.json model.tensors_digest", expected=facts.tensors_digest, got=got
        )

    def saved() -> Iterator[Finding]:
        cell = view.newest.header
        assert cell is not None
        found = {name: (entry.dtype, entry.shape) for name, entry in cell.get().tensors.items()}
        for name in sorted(facts.tensors.keys() | found.keys()):
            expected, got = (_describe(each.get(name)) for each in (facts.tensors, found))
            yield from differs("A tensor of the final checkpoint", f"{cell.where} {name}", expected=expected, got=got)

    yield from guarded({"recorded": recorded, "saved": saved})


def _describe(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if tensor is None else f"{tensor[0]} {list(tensor[1])}"


def _behaviour(view: RunView) -> Behaviour:
    found = behaviour(view.config)
    if found.crash is not None:
        raise Needs(f"A tiny copy of the model cannot be run: {found.crash}.", "run.json config")
    return found


@check("M4")
def check_causality(view: RunView) -> Iterator[Finding]:
    """No look ahead."""
    for problem in _behaviour(view).causality:
        yield error(problem, "run.json config")


@check("M5")
def check_distribution(view: RunView) -> Iterator[Finding]:
    """A normalized distribution; independent rows."""
    for problem in _behaviour(view).distribution:
        yield error(problem, "run.json config")


@check("M6")
def check_update_dependence(view: RunView) -> Iterator[Finding]:
    """Dependence on the update is said, and the final update was set."""
    expected, got = view.facts.is_update_dependent, view.run.get().model.is_update_dependent
    if expected != got:
        yield warning(
            "Whether the method depends on the update differs.",
            "run.json model.is_update_dependent",
            expected=expected,
            got=got,
        )
    final, last = view.evaluation("final.json").get(), view.reference.protocol.num_updates
    if final.update != last:
        yield warning(
            "The final evaluation did not set the final update.",
            "evaluations/final.json update",
            expected=last,
            got=final.update,
        )
