"""From a read run folder to its record. Every number is copied or computed from the run's files and the package."""

import math
import statistics

from nexttransformer.audit.check import Needs
from nexttransformer.audit.report import AuditRecord
from nexttransformer.audit.run_view import RunView
from nexttransformer.checking.budget_rules import find_track
from nexttransformer.errors import AuditError
from nexttransformer.evaluation.results import CoreScore, EvaluationRecord, SplitScore
from nexttransformer.export import record as schema
from nexttransformer.export.submission_file import Submission
from nexttransformer.models.budget import reference_budget
from nexttransformer.training.checkpoint_schema import ProtocolReference

_SECONDS_PER_HOUR = 3600


def build_record(
    view: RunView,
    audit: AuditRecord,
    *,
    audit_digest: str,
    display_name: str,
    submission: Submission,
    package: dict[str, str],
) -> schema.Record:
    """Returns the record of an audited run.

    Args:
        view: the run folder, read as the audit reads it.
        audit: its passing audit.
        audit_digest: SHA-256 of the audit file.
        display_name: name on pages.
        submission: authors, licence, citation, links, supersedes.
        package: file name -> SHA-256 of the exported folder.

    Raises:
        AuditError: a needed file of the run cannot be used, or the name is not one line of text.
    """
    try:
        return _build(view, audit, audit_digest, display_name, submission, package)
    except Needs as missing:
        raise AuditError(f"{view.root}: {missing} Audit the run again.") from None


def _build(
    view: RunView,
    audit: AuditRecord,
    audit_digest: str,
    display_name: str,
    submission: Submission,
    package: dict[str, str],
) -> schema.Record:
    run, marker = view.run.get(), view.newest.marker.get()
    facts, protocol = view.facts, view.reference.protocol
    reference = reference_budget(protocol)
    final = view.evaluation("final.json").get()
    core_bundle = run.data.core_bundle
    if core_bundle is None:
        raise Needs("Needs the run's CORE bundle, and it evaluated no CORE.", "run.json data.core_bundle")
    warnings = [finding.id for finding in audit.findings if finding.severity == "warning"]
    value = {
        "schema": schema.Record.SCHEMA,
        "division": audit.division,
        "method": run.method,
        "family": run.family,
        "display_name": display_name,
        "track": find_track(facts.budget, protocol).name,
        "protocol": ProtocolReference(id=protocol.id, digest=protocol.digest).model_dump(),
        "package_version": run.code.package_version,
        "commit": run.code.commit,
        "run_id": run.run_id,
        "model": {
            "num_parameters": facts.budget.num_parameters,
            "num_lookup": facts.budget.num_lookup,
            "num_matmul": facts.budget.num_matmul,
            "training_flops_per_token": round(facts.budget.training_flops_per_token),
            "flops_ratio": facts.budget.training_flops_per_token / reference.training_flops_per_token,
            "matmul_ratio": facts.budget.num_matmul / reference.num_matmul,
            "decode_state_bytes": facts.budget.decode_state_bytes,
        },
        "training": _training(view),
        "results": {
            "bpb_final": _bpb_final(final),
            "bpb_curve": [
                [update, _split(view, f"val_curve_{update:08d}.json", "val_curve").bpb]
                for update in protocol.bpb_updates()
            ],
            "core": _core(view),
        },
        "digests": {
            "config": run.config_digest,
            "source": run.code.source_digest,
            "parts": run.code.parts_digest,
            **{
                key: getattr(run.data, key)
                for key in ("manifest", "tokenizer", "byte_table", "data_order", "val_curve", "val_final")
            },
            "core_bundle": core_bundle,
            "data_chain": marker.data_chain,
            "weights": marker.weights_digest,
            "complete": marker.complete_digest,
            "run": audit.run_digest,
            "audit": audit_digest,
            "package": package,
        },
        "audit": {
            "verdict": audit.verdict,
            "num_warnings": len(warnings),
            "num_waivers": audit.counts.waived,
            "warning_ids": sorted(set(warnings)),
        },
        "supersedes": submission.supersedes.model_dump() if submission.supersedes else None,
        "authors": submission.authors,
        "licence": submission.licence,
        "citation": submission.citation,
        "links": [link.model_dump() for link in submission.links],
    }
    return schema.Record.from_json(value, "the record", AuditError)


def _training(view: RunView) -> dict:
    run, metrics, timeline = view.run.get(), view.metrics.get(), view.timeline
    seconds = {number: math.fsum(metrics.seconds[metrics.attempt == number].tolist()) for number in timeline.attempts}
    attempts = [
        {
            "attempt": attempt.number,
            "world_size": attempt.meta.world_size,
            "num_nodes": attempt.meta.num_nodes,
            "micro_batch": attempt.meta.micro_batch,
            "gpus": attempt.meta.gpus,
            "first_update": attempt.first,
            "last_update": attempt.last,
        }
        for attempt in timeline.attempts.values()
    ]
    gpu_seconds = math.fsum(seconds[each["attempt"]] * each["world_size"] for each in attempts)
    last = timeline.attempts[max(timeline.attempts)]
    return {
        "num_updates": run.num_updates,
        "tokens": view.newest.marker.get().tokens_seen,
        "seed": run.seed,
        "attempts": attempts,
        "gpu_hours": gpu_seconds / _SECONDS_PER_HOUR,
        "median_tokens_per_second": statistics.median(metrics.tokens_per_second[timeline.lines].tolist()),
        "versions": last.meta.versions.model_dump(),
    }


def _split(view: RunView, name: str, split: str) -> SplitScore:
    record = view.evaluation(name).get()
    if split not in record.bpb:
        raise Needs(f"Needs the score of {split}, and there is none.", f"evaluations/{name}")
    return record.bpb[split]


def _bpb_final(final: EvaluationRecord) -> dict:
    if "val_final" not in final.bpb:
        raise Needs("Needs the score of val_final, and there is none.", "evaluations/final.json")
    score = final.bpb["val_final"]
    return {key: getattr(score, key) for key in ("nats_hex", "nats", "bytes", "tokens_counted", "bpb")}


def _core(view: RunView) -> dict:
    def score(update: int) -> CoreScore:
        name = f"core_{update:08d}.json"
        core = view.evaluation(name).get().core
        if core is None:
            raise Needs("Needs the CORE of a preset update, and there is none.", f"evaluations/{name}")
        return core

    scores = {update: score(update) for update in view.reference.protocol.core_updates()}
    last = scores[max(scores)]
    keys = ("label", "num_correct", "rows", "centered_v1", "centered_v2")
    return {
        "curve": [[update, core.core_v1, core.core_v2] for update, core in scores.items()],
        "core_limited": last.core_limited,
        "tasks": [{key: getattr(task, key) for key in keys} for task in last.tasks],
    }
