"""Runs the parts of a benchmark. A part that fails leaves its message; the others still report."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nexttransformer.benchmark.breakdown import measure_breakdown
from nexttransformer.benchmark.evaluation import measure_evaluation
from nexttransformer.benchmark.measure import measure_optimizer, measure_step, measure_update
from nexttransformer.benchmark.options import JOB_PARTS, PASS_PARTS, BenchOptions
from nexttransformer.benchmark.projection import project
from nexttransformer.benchmark.record import new_record, write_record
from nexttransformer.benchmark.roofline import measure_machine, measure_roofline, measure_tiles
from nexttransformer.benchmark.storage import measure_checkpoint
from nexttransformer.benchmark.subject import Passes, Subject, build_subject, make_passes, release
from nexttransformer.benchmark.transfer import measure_communication, measure_data
from nexttransformer.config import ModelConfig
from nexttransformer.evaluation.failures import describe
from nexttransformer.ops.self_check import check_kernels
from nexttransformer.site_config import default_cache_root
from nexttransformer.training.collectives import all_agree
from nexttransformer.training.compile_cache import set_cache_folders
from nexttransformer.training.distributed import World
from nexttransformer.training.kernel_tuning import KernelTuning
from nexttransformer.training.shares import largest_share

# A sweep starts here: below, large models only show launch overhead.
_SWEEP_START = 4
# Parts that compute nothing of use once the pass itself does not run.
_NEED_PASS = ("update", "breakdown")

Measurement = Callable[[], dict[str, Any]]
Say = Callable[[str], None]


@dataclass
class Benchmark:
    """One launch of `bench` on this rank. `record` is complete at any time for what has run."""

    options: BenchOptions
    world: World
    say: Say
    record: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Measures everything asked for and returns the record. Collective."""
        options, world = self.options, self.world
        if options.site is not None:
            set_cache_folders(options.site.cache_root, world)
        elif world.world_size > 1:
            # Processes that share one compile cache have damaged it.
            set_cache_folders(Path.home() / ".cache" / "nexttransformer_bench", world)
        self.record = new_record(options, world)
        if "roofline" in options.parts:
            self._measure(self.record, "machine", "this machine's product and copy", lambda: measure_machine(world))
        for config in options.configs:
            self._configuration(config)
        self.record["is_complete"] = True
        self._write()
        return self.record

    def _write(self) -> None:
        write_record(self.options.output, self.record, is_main=self.world.is_main)

    def _measure(self, place: dict[str, Any], key: str, title: str, function: Measurement) -> dict[str, Any]:
        """Runs a part; its result, or {"error": line} equal on all ranks, goes to `place` and disk. Collective."""
        self.say(title)
        result: dict[str, Any] = {}
        problem = None
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - one part's failure is its result; the others go on
            problem = describe(error)
        if problem is not None:
            # Here, not in the handler: there the traceback keeps the failed part's tensors alive.
            gc.collect()
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()
        control = self.world.control
        gathered = control.broadcast_object(control.gather_objects(problem))
        found = next((each for each in gathered if each is not None), None)
        if found is not None:
            self.record["problems"].append(f"{title}: {found}")
            self.say(f"{title} failed: {found}")
            result = {"error": found}
        place[key] = result
        self._write()
        return result

    def _configuration(self, config: ModelConfig) -> None:
        options, world, name = self.options, self.world, config.method
        entry: dict[str, Any] = {
            "method": name,
            "config_digest": config.digest,
            "kernels": {},
            "model": {},
            "runs": [],
            "parts": {},
            "best_micro_batch": None,
            "projection": None,
        }
        self.record["configurations"].append(entry)
        self._measure(entry, "kernels", f"{name}: kernel self-check", lambda: self._kernels(config))
        subjects: list[Subject] = []

        def build() -> dict[str, Any]:
            subjects.append(build_subject(config, options, world))
            return _model_facts(subjects[0])

        if "error" in self._measure(entry, "model", f"{name}: build", build):
            return
        subject = subjects.pop()
        for micro_batch in options.micro_batches:
            self._micro_batch(subject, _new_run(entry, micro_batch), PASS_PARTS)
        if options.is_sweep:
            self._sweep(subject, entry)
        rates = {run["micro_batch"]: run.get("step", {}).get("tokens_per_second", 0.0) for run in entry["runs"]}
        best = max(entry["runs"], key=lambda run: rates[run["micro_batch"]])
        entry["best_micro_batch"] = best["micro_batch"] if rates[best["micro_batch"]] else None
        if options.is_sweep and entry["best_micro_batch"] is not None:
            self._micro_batch(subject, best, tuple(part for part in PASS_PARTS if part != "step"))
        for part, function in self._job_parts(subject, best["micro_batch"]).items():
            if part in options.parts:
                self._measure(entry["parts"], part, f"{name}: {part}", function)
        entry["projection"] = project(
            best, entry["parts"], options.protocol, world_size=world.world_size, num_gpus=options.num_gpus
        )
        del subject
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        self._write()

    def _kernels(self, config: ModelConfig) -> dict[str, Any]:
        agree = partial(all_agree, collectives=self.world.control)
        site, world = self.options.site, self.world
        tuning = KernelTuning(
            world.control, world.device, cache_root=site.cache_root if site is not None else default_cache_root()
        )
        verdict = check_kernels(config, mode="open", device=world.device, all_agree=agree, tuner=tuning)
        for note in tuning.notes:
            self.say(note)
        return {key: verdict[key] for key in ("choices", "passed", "seconds", "tuning")}

    def _sweep(self, subject: Subject, entry: dict[str, Any]) -> None:
        """Adds the step at doubled micro-batches until one does not fit."""
        for micro_batch in sweep_sizes(largest_share(self.world.world_size, self.options.protocol.global_batch_rows)):
            run = _new_run(entry, micro_batch)
            self._micro_batch(subject, run, ("step",))
            if "error" in run["step"]:
                return

    def _micro_batch(self, subject: Subject, run: dict[str, Any], parts: tuple[str, ...]) -> None:
        """Measures parts at one micro-batch, into `run`."""
        wanted = [part for part in parts if part in self.options.parts or (self.options.is_sweep and part == "step")]
        title = f"{subject.config.method}, micro-batch {run['micro_batch']}"
        made: list[Passes] = []

        def make() -> dict[str, Any]:
            made.append(make_passes(subject, self.options, run["micro_batch"]))
            plan = made[0].plan
            return {"num_micro_batches": plan.num_micro_batches, "num_padded_rows": plan.num_padded}

        problem = self._measure(run, "plan", f"{title}: set up", make).get("error")
        for part in wanted:
            if problem is not None:
                run[part] = {"error": problem}
            elif part in _NEED_PASS and "error" in run.get("step", {}):
                run[part] = {"error": "skipped, since the step failed"}
            else:
                self._measure(run, part, f"{title}: {part}", self._pass_parts(made[0])[part])
        self._relate(run)
        made.clear()
        release(subject)

    def _relate(self, run: dict[str, Any]) -> None:
        """Adds the share of the roofline that the step reaches."""
        bound = run.get("roofline", {}).get("tokens_per_second")
        reached = run.get("step", {}).get("tokens_per_second")
        run["roofline_fraction"] = reached / bound if bound and reached else None

    def _pass_parts(self, passes: Passes) -> dict[str, Measurement]:
        options, machine = self.options, self.record["machine"]

        def roofline() -> dict[str, Any]:
            if "error" in machine:
                return {"error": machine["error"]}
            return measure_roofline(passes, machine, is_compiled=options.is_compiled)

        return {
            "roofline": roofline,
            "step": lambda: measure_step(passes, options),
            "update": lambda: measure_update(passes, options),
            "breakdown": lambda: measure_breakdown(passes, options.trace),
            "tiles": lambda: measure_tiles(passes),
        }

    def _job_parts(self, subject: Subject, micro_batch: int) -> dict[str, Measurement]:
        options = self.options
        rows = "prepared" if options.site is not None else "synthetic"
        parts: dict[str, Measurement] = {
            "optimizer": lambda: measure_optimizer(subject, options),
            "communication": lambda: measure_communication(subject),
            "data": lambda: measure_data(subject, micro_batch, rows),
            "evaluate": lambda: measure_evaluation(subject, options, micro_batch),
            "checkpoint": lambda: measure_checkpoint(subject, options),
        }
        assert tuple(parts) == JOB_PARTS
        return parts


def sweep_sizes(largest: int) -> Iterator[int]:
    """Yields the micro-batches of a sweep: doubling, up to a rank's share of the batch."""
    size = _SWEEP_START if largest > _SWEEP_START**2 else 1
    while size < largest:
        yield size
        size *= 2
    yield largest


def _new_run(entry: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    """Adds a run to a configuration's entry before it is measured, so that its parts are written as they come."""
    run: dict[str, Any] = {"micro_batch": micro_batch, "roofline_fraction": None}
    entry["runs"].append(run)
    return run


def _model_facts(subject: Subject) -> dict[str, Any]:
    budget = subject.budget
    return {
        "num_parameters": budget.num_parameters,
        "num_matmul": budget.num_matmul,
        "training_flops_per_token": budget.training_flops_per_token,
        "nominal_flops_per_token": budget.nominal_flops_per_token,
        "build_seconds": subject.build_seconds,
        "num_tensors_made_nonzero": subject.num_filled,
        "compute_dtype": str(subject.model.compute_dtype).removeprefix("torch."),
    }
