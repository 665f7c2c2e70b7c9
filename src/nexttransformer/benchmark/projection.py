"""Hours of a whole run of the protocol, calculated from the measured parts. Pure arithmetic."""

from typing import Any

from nexttransformer.protocol import Protocol
from nexttransformer.training.shares import largest_share


def project(
    run: dict[str, Any], parts: dict[str, Any], protocol: Protocol, *, world_size: int, num_gpus: int
) -> dict[str, Any] | None:
    """Returns the hours of a run on N devices, by component; None without a measured step.

    What an update costs beside its passes is the larger of the optimizer's step and of the difference
    between the measured update and its passes. One device updates every matrix itself, several share them,
    so figures from one device are an upper bound for more, as far as the reduction is hidden.

    Args:
        run: parts of the micro-batch.
        parts: parts of the configuration.
        protocol: gives updates, rows and cadences.
        world_size: devices that were measured.
        num_gpus: devices of the projected run.
    """
    step, update = run.get("step", {}), run.get("update", {})
    if "seconds" not in step:
        return None
    step_seconds = step["seconds"]["median_seconds"]
    passes = -(-largest_share(num_gpus, protocol.global_batch_rows) // run["micro_batch"])
    candidates = {"none": 0.0}
    if "seconds" in update:
        candidates["update"] = update["seconds"]["median_seconds"] - update["num_micro_batches"] * step_seconds
    if "seconds" in parts.get("optimizer", {}):
        candidates["optimizer"] = parts["optimizer"]["seconds"]["median_seconds"]
    source, beside = max(candidates.items(), key=lambda item: item[1])
    update_seconds = passes * step_seconds + beside
    hours = {"passes": protocol.num_updates * passes * step_seconds / 3600}
    hours["beside_passes"] = protocol.num_updates * beside / 3600
    checkpoint, evaluation = parts.get("checkpoint", {}), parts.get("evaluate", {})
    if "save_seconds" in checkpoint:
        num_saves = protocol.num_updates // protocol.save_every_updates
        hours["saves"] = num_saves * checkpoint["save_seconds"] / 3600
    if "validation" in evaluation:
        share = world_size / num_gpus
        num_curves, num_cores = len(protocol.bpb_updates()), len(protocol.core_updates())
        hours["validation"] = num_curves * evaluation["validation"]["val_curve_seconds"] * share / 3600
        if evaluation["core"]["bundle"] == "full":
            hours["core"] = num_cores * evaluation["core"]["bundle_seconds"] * share / 3600
    total = sum(hours.values())
    return {
        "num_gpus": num_gpus,
        "micro_batch": run["micro_batch"],
        "num_micro_batches": passes,
        "update_seconds": update_seconds,
        "tokens_per_second": protocol.tokens_per_update / update_seconds,
        "beside_passes_from": source,
        "hours": hours,
        "total_hours": total,
        "gpu_hours": num_gpus * total,
    }
