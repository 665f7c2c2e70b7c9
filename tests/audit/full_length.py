"""A synthetic formal run of full length: real formats and numbers, a tiny stub of a model, everything consistent.

Every file audit of such a folder must pass: this is what a file audit cannot tell from a trained run.
"""

import base64
import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from nexttransformer import jsonio, provenance
from nexttransformer.audit.model_facts import model_facts
from nexttransformer.audit.reference import FULL_TASKS_FILE, Reference
from nexttransformer.config import configs_folder, resolve_method
from nexttransformer.data import order
from nexttransformer.models import build_model
from nexttransformer.optim.schedule import scheduled_rates
from nexttransformer.protocol import BUNDLE_TASKS_DIGESTS, FORMAL_V1, FULL_BUNDLE, Protocol
from nexttransformer.training.run_record import group_records
from nexttransformer.training.shares import rank_rows
from nexttransformer.training.weights_digest import weights_digest

METHOD, FAMILY = "dense_full", "baseline"
COMMIT = "c" * 40
RUN_ID = "0123456789abcdef"
WORLD_SIZE = 16
# Resumes: (update resumed at, last update that the attempt before had made).
RESUMES = ((20_000, 20_177), (41_250, 41_700))
# Sizes of a stub; lengths, batch, schedules and evaluations are those of formal-v1.
PROTOCOL = dataclasses.replace(
    FORMAL_V1, width=64, num_heads=2, head_dim=32, num_layers=4, mlp_width=256, mlp_width_step=2, vocab_size=512
)


@dataclass(frozen=True)
class StubCode:
    """The installed package as if it were the recorded commit, with a configuration of the stub's size."""

    mlp_width: int = PROTOCOL.mlp_width
    is_commit: bool = True
    files: dict[str, str] = field(default_factory=provenance.package_files)

    def package_files(self, commit: str | None) -> dict[str, str]:
        return self.files

    def package_file(self, commit: str | None, path: str) -> bytes | None:
        return (provenance.PACKAGE / path).read_bytes()

    def config(self, commit: str | None, family: str, method: str) -> bytes | None:
        value = json.loads((configs_folder() / family / f"{method}.json").read_text())
        value["mlp"]["width"] = self.mlp_width
        return jsonio.canonical_bytes(value)


def hex64(text: str) -> str:
    """Returns a made-up digest."""
    return hashlib.sha256(text.encode()).hexdigest()


def split_facts(protocol: Protocol, name: str) -> dict[str, Any]:
    """Returns made-up published facts of a validation split."""
    rows = protocol.val_curve_rows if name == "val_curve" else protocol.val_final_rows
    tokens = rows * protocol.context_tokens
    return {"digest": hex64(name), "rows": rows, "tokens_counted": tokens - rows, "bytes": 4 * tokens}


class FullLengthRun:
    """Writes the run and knows by what it must be judged."""

    def __init__(self, root: Path, code: StubCode | None = None) -> None:
        self.root, self.code, self.protocol = root, code or StubCode(), PROTOCOL
        self.data = {key: hex64(key) for key in ("manifest", "tokenizer", "byte_table", "data_order")}
        self.splits = {name: split_facts(PROTOCOL, name) for name in ("val_curve", "val_final")}
        content = self.code.config(COMMIT, FAMILY, METHOD)
        assert content is not None
        self.config = resolve_method(json.loads(content), PROTOCOL)
        self.facts = model_facts(self.config, PROTOCOL)
        self.files = self.code.files
        self.source = provenance.source_digest(self.files)
        self.parts = jsonio.digest(sorted((path, self.files[path]) for path in self.facts.part_files))
        hashes = np.random.default_rng(0).integers(0, 2**64, PROTOCOL.num_updates + 1, dtype=np.uint64)
        self.hashes = [int(value) for value in hashes]
        self.chains = [order.initial_chain()]
        for update in range(1, PROTOCOL.num_updates + 1):
            self.chains.append(order.next_chain(self.chains[-1], update, self.hashes[update]))
        self.events: list[dict[str, Any]] = []
        self.previous = ""
        (root / "evaluations").mkdir(parents=True)
        self.final_digests = self._write_checkpoint()
        self._write_run()
        self._write_metrics()
        self._write_events()

    @property
    def reference(self) -> Reference:
        """What the run is judged by: its own digests, as if they had been published."""
        published = {**self.data, **self.splits}
        return Reference(
            protocol=self.protocol,
            published=published,
            data_order={update: self.chains[update] for update in self.protocol.bpb_updates()},
            code=self.code,
        )

    def _write(self, name: str, value: Any) -> bytes:
        content = jsonio.canonical_bytes(value) if name.endswith("complete.json") else jsonio.pretty_bytes(value)
        (self.root / name).write_bytes(content)
        return content

    def _data(self) -> dict[str, Any]:
        digests = {name: facts["digest"] for name, facts in self.splits.items()}
        return {**self.data, **digests, "core_bundle": BUNDLE_TASKS_DIGESTS[FULL_BUNDLE]}

    def _code(self) -> dict[str, Any]:
        return {
            "package_version": "0.1.0",
            "commit": COMMIT,
            "is_clean": True,
            "source_digest": self.source,
            "parts_digest": self.parts,
        }

    def _write_run(self) -> None:
        budget, protocol = self.facts.budget, self.protocol
        self._write(
            "run.json",
            {
                "schema": "nexttransformer.run/1",
                "run_id": RUN_ID,
                "created": "2026-01-01T00:00:00.000Z",
                "mode": "formal",
                "smoke_updates": None,
                "num_updates": protocol.num_updates,
                "method": METHOD,
                "family": FAMILY,
                "config": self.config.to_dict(),
                "config_digest": self.config.digest,
                "protocol": {"id": protocol.id, "digest": protocol.digest, "constants": protocol.constants()},
                "data": {**self._data(), "byte_table_version": protocol.byte_table_version},
                "code": {**self._code(), "source_files": self.files},
                "model": {
                    "num_parameters": budget.num_parameters,
                    "num_lookup": budget.num_lookup,
                    "num_matmul": budget.num_matmul,
                    "training_flops_per_token": round(budget.training_flops_per_token),
                    "tensors_digest": self.facts.tensors_digest,
                    "is_update_dependent": False,
                },
                "optimizer_groups": [group.model_dump() for group in group_records(self.facts.groups, protocol)],
                "precision_policy": protocol.precision_policy,
                "loss": protocol.loss,
                "seed": protocol.seed,
            },
        )
        state = {"status": "finished", "update": protocol.num_updates, "attempt": 2, "reason": "last_update"}
        names = {"newest_checkpoint": "checkpoint_00046875", "num_attempts_without_progress": 0}
        self._write("run_state.json", {"schema": "nexttransformer.run_state/1", **state, **names})

    def _write_checkpoint(self) -> tuple[str, str]:
        """Writes the final checkpoint; returns (complete digest, weights digest)."""
        protocol, update = self.protocol, self.protocol.num_updates
        name = f"checkpoint_{update:08d}"
        folder = self.root / name
        folder.mkdir()
        model = build_model(self.config)
        tensors = {key: value.detach().contiguous() for key, value in model.named_parameters()}
        metadata = {
            "run_id": RUN_ID,
            "mode": "formal",
            "method": METHOD,
            "protocol": protocol.id,
            "update": str(update),
        }
        save_file(tensors, folder / "model.safetensors", metadata)
        optimizer = "optimizer_00000_of_00001.safetensors"
        save_file({f"{key}::state": value.new_zeros(1) for key, value in tensors.items()}, folder / optimizer, metadata)
        group_of = {key: group.settings.name for group in self.facts.groups for key in group.names}
        states = {"state": {"dtype": "F32", "shape": [1]}}
        index = {key: {"file": optimizer, "group": group_of[key], "states": states} for key in tensors}
        self._write(
            f"{name}/optimizer_index.json", {"schema": "nexttransformer.optimizer_index/1", "parameters": index}
        )
        self._write(f"{name}/model_config.json", self.config.to_dict())
        constants = {"id": protocol.id, "digest": protocol.digest, "constants": protocol.constants()}
        self._write(f"{name}/protocol.json", {"schema": "nexttransformer.protocol/1", **constants})
        digests = {"config": self.config.digest, "protocol": protocol.digest, "source": self.source, **self._data()}
        common = {
            "run_id": RUN_ID,
            "mode": "formal",
            "method": METHOD,
            "update": update,
            "tokens_seen": update * protocol.tokens_per_update,
            "data_chain": order.to_hex(self.chains[update]),
        }
        state = {
            "schema": "nexttransformer.trainer_state/1",
            **common,
            "num_updates": update,
            "last_update": update,
            "seed": protocol.seed,
            "next_row": update * protocol.global_batch_rows,
            "optimizer_updates": update,
            "spike_losses": [],
            "num_spikes": 0,
            "attempt": 2,
            "world_size": WORLD_SIZE,
            "micro_batch": 16,
            "digests": digests,
        }
        self._write(f"{name}/trainer_state.json", state)
        files = [
            {"path": path.name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in sorted(folder.iterdir())
        ]
        marker = {
            "schema": "nexttransformer.complete/1",
            **common,
            "protocol": {"id": protocol.id, "digest": protocol.digest},
            "weights_digest": weights_digest(tensors),
            "files": files,
        }
        self._write(f"{name}/complete.json", marker)
        return jsonio.digest(marker), marker["weights_digest"]

    def attempts(self) -> list[tuple[int, int, int]]:
        """Returns (attempt, first, last) in updates."""
        starts = [0, *(start for start, _ in RESUMES)]
        ends = [*(end for _, end in RESUMES), self.protocol.num_updates]
        return [(number, start, end) for number, (start, end) in enumerate(zip(starts, ends, strict=True))]

    def _write_metrics(self) -> None:
        protocol, lines = self.protocol, []
        for attempt, first, last in self.attempts():
            for update in range(first + 1, last + 1):
                rates = scheduled_rates(
                    update - 1, self.facts.groups, num_updates=protocol.num_updates, protocol=protocol
                )
                norm = 0.1 + 1 / update
                loss = 2.5 + (math.log(protocol.vocab_size) - 2.5) / update**0.3
                # The keys in canonical order; floats in their shortest form, as JSON has them.
                lines.append(
                    f'{{"attempt":{attempt},"data_chain":"{self.chains[update]:016x}","gradient_norm":{norm!r},'
                    f'"learning_rates":{list(rates.learning_rates)},"loss_nats":{loss!r},"mfu_fraction":0.4123456789,'
                    f'"muon_momentum":{rates.muon_momentum!r},"muon_weight_decay":{rates.muon_weight_decay!r},'
                    f'"peak_memory_bytes":100000000000,"rows":{protocol.global_batch_rows},'
                    f'"rows_hash":"{self.hashes[update]:016x}","seconds":1.0,"tokens":{protocol.tokens_per_update},'
                    f'"tokens_per_second":{float(protocol.tokens_per_update)!r},'
                    f'"tokens_seen":{update * protocol.tokens_per_update},"update":{update}}}\n'
                )
        (self.root / "metrics.jsonl").write_text("".join(lines))

    def _event(self, attempt: int, update: int, key: str, value: Any, meta: dict[str, Any]) -> None:
        event = {
            "seq": len(self.events),
            "time": f"2026-01-{1 + update // 10_000:02d}T00:00:00.000Z",
            "attempt": attempt,
            "update": update,
            "key": key,
            "value": value,
            "meta": meta,
            "prev": self.previous,
        }
        self.previous = hashlib.sha256(jsonio.canonical_bytes(event)).hexdigest()[:16]
        self.events.append(event)

    def _digests(self, update: int) -> tuple[str, str]:
        """Returns complete and weights digest of the checkpoint of an update."""
        is_last = update == self.protocol.num_updates
        return self.final_digests if is_last else (hex64(f"complete {update}"), hex64(f"weights {update}"))

    def _write_events(self) -> None:
        protocol, last_update = self.protocol, self.protocol.num_updates
        for attempt, first, last in self.attempts():
            self._event(attempt, first, "attempt_start", attempt, self._attempt_meta(first))
            if first == 0:
                self._evaluation(attempt, 0, "val_curve")
            for update in range(first + 625, last + 1, 625):
                complete, weights = self._digests(update)
                meta = {
                    "reason": "final" if update == last_update else "scheduled",
                    "complete_digest": complete,
                    "weights_digest": weights,
                    "tokens_seen": update * protocol.tokens_per_update,
                    "data_chain": order.to_hex(self.chains[update]),
                    "bytes": 13_700_000_000,
                    "seconds": 6.0,
                }
                self._event(attempt, update, "checkpoint_saved", f"checkpoint_{update:08d}", meta)
                self._evaluation(attempt, update, "val_curve")
                if update % 3125 == 0:
                    self._evaluation(attempt, update, "core")
        self._evaluation(2, last_update, "final")
        self._event(2, last_update, "attempt_end", "finished", {"reason": "last_update"})
        end = {"checkpoint": f"checkpoint_{last_update:08d}", "complete_digest": self.final_digests[0]}
        self._event(2, last_update, "run_end", "finished", end)
        content = b"".join(jsonio.canonical_bytes(event) + b"\n" for event in self.events)
        (self.root / "events.jsonl").write_bytes(content)

    def _attempt_meta(self, first: int) -> dict[str, Any]:
        versions = {"cuda": "13.0", "nccl": "2.28.9", "driver": "580.1", "triton": "3.7.0", "fla": "0.6.0"}
        return {
            "mode": "formal",
            "resumed_from": f"checkpoint_{first:08d}" if first else None,
            "resumed_update": first,
            "resumed_complete_digest": self._digests(first)[0] if first else None,
            "world_size": WORLD_SIZE,
            "num_nodes": 2,
            "micro_batch": 16,
            "rank_rows": rank_rows(WORLD_SIZE, self.protocol.global_batch_rows),
            "hosts": ["0" * 16, "1" * 16],
            "gpus": {"NVIDIA H200": WORLD_SIZE},
            "versions": {**versions, "python": "3.12.1", "torch": "2.13.0", "accelerate": "1.15.0", "package": "0.1.0"},
            "code": self._code(),
            "config_digest": self.config.digest,
            "protocol_digest": self.protocol.digest,
            "data": {**self._data(), "byte_table_version": self.protocol.byte_table_version},
            "seed": self.protocol.seed,
            "argv": ["--formal"],
            "kernels": {
                "passed": True,
                "choices": [
                    {
                        "op": "attention",
                        "path": "native",
                        "reason": "self_check_passed",
                        "guard": "none",
                        "problem": None,
                    }
                ],
            },
        }

    def _evaluation(self, attempt: int, update: int, kind: str) -> None:
        complete, weights = self._digests(update) if update else (None, hex64("weights 0"))
        name = "evaluations/final.json" if kind == "final" else f"evaluations/{kind}_{update:08d}.json"
        splits = {"val_curve": ["val_curve"], "core": [], "final": ["val_curve", "val_final"]}[kind]
        bpb = {split: self._score(split, 0.75 + 0.3 / (1 + update / 1000)) for split in splits}
        core = self._core(update) if kind == "core" else None
        value = {
            "schema": "nexttransformer.evaluation/1",
            "kind": kind,
            "run_id": RUN_ID,
            "mode": "formal",
            "method": METHOD,
            "update": update,
            "protocol": {"id": self.protocol.id, "digest": self.protocol.digest},
            "checkpoint": {"complete_digest": complete, "weights_digest": weights},
            "software": {
                "nexttransformer": "0.1.0",
                "python": "3.12.1",
                "torch": "2.13.0",
                "cuda": "13.0",
                "source_digest": self.source,
            },
            "precision": "bfloat16",
            "num_processes": WORLD_SIZE,
            "micro_batch": 16,
            "bpb": bpb,
            "core": core,
            "errors": [],
        }
        content = self._write(name, value)
        meta: dict[str, Any] = {"file": name, "file_digest": hashlib.sha256(content).hexdigest(), "seconds": 9.0}
        meta["complete_digest"] = complete
        if core is not None:
            meta["core_v1"] = core["core_v1"]
        else:
            meta["bpb"] = bpb[splits[-1]]["bpb"]
        self._event(attempt, update, "evaluation", kind, meta)

    def _score(self, split: str, bpb: float) -> dict[str, Any]:
        facts = self.splits[split]
        nats = bpb * math.log(2) * facts["bytes"]
        return {
            "split_digest": facts["digest"],
            "byte_table_version": self.protocol.byte_table_version,
            "byte_table_digest": self.data["byte_table"],
            **{key: facts[key] for key in ("rows", "tokens_counted", "bytes")},
            "nats": nats,
            "nats_hex": nats.hex(),
            "bpb": nats / (math.log(2) * facts["bytes"]),
        }

    def _core(self, update: int) -> dict[str, Any]:
        tasks = []
        for entry in json.loads(FULL_TASKS_FILE.read_text())["tasks"]:
            bits = np.random.default_rng(update).random(entry["rows"]) < 0.45
            accuracy = int(bits.sum()) / entry["rows"]
            baselines = {"v1": entry["random_baseline"], "v2": entry["random_baseline_v2"]}
            zeros = ("num_beyond_context", "num_cut", "num_prefix_fallbacks", "num_empty_spans", "num_near_ties")
            tasks.append(
                {
                    "label": entry["label"],
                    "rows": entry["rows"],
                    "num_fewshot": entry["num_fewshot"],
                    "num_correct": int(bits.sum()),
                    "accuracy": accuracy,
                    "correct_bits": base64.b64encode(np.packbits(bits).tobytes()).decode(),
                    "num_prompts": entry["rows"],
                    "max_prompt_tokens": 100,
                    "error": None,
                    **dict.fromkeys(zeros, 0),
                    **{f"baseline_{key}": float(base) for key, base in baselines.items()},
                    **{f"centered_{key}": (accuracy - b / 100) / (1 - b / 100) for key, b in baselines.items()},
                }
            )
        means = {f"core_{key}": math.fsum(task[f"centered_{key}"] for task in tasks) / 22 for key in ("v1", "v2")}
        return {
            **means,
            "core_limited": None,
            "limit": None,
            "bundle_digest": BUNDLE_TASKS_DIGESTS[FULL_BUNDLE],
            "tokenizer_digest": self.data["tokenizer"],
            "path": "shared",
            "batch_tokens": self.protocol.core_batch_tokens,
            "num_split_batches": 0,
            "tasks": tasks,
        }
