"""Edits a copy of a run and seals it again: chains, markers and digests recomputed as a forger would."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from nexttransformer import jsonio
from nexttransformer.data import order
from nexttransformer.training.weights_digest import weights_digest


def copy_run(source: Path, target: Path) -> "RunCopy":
    """Returns a copy whose files are hard links; every edit replaces a file and never writes into one."""
    shutil.copytree(source, target, copy_function=os.link)
    return RunCopy(target)


class RunCopy:
    """A run folder to edit. `events` and `metrics` are lists of dicts; `seal` writes them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events = self._lines("events.jsonl")
        self.metrics = self._lines("metrics.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.root / name).read_bytes().splitlines()]

    def replace(self, name: str, content: bytes) -> None:
        """Replaces a file's content."""
        path = self.root / name
        temporary = path.with_name(f"{path.name}.new")
        temporary.write_bytes(content)
        os.replace(temporary, path)

    def bytes(self, name: str) -> bytes:
        """Returns a file's content."""
        return (self.root / name).read_bytes()

    def json(self, name: str) -> Any:
        """Returns a JSON file's value."""
        return json.loads(self.bytes(name))

    @contextmanager
    def edit(self, name: str) -> Iterator[Any]:
        """Edits a JSON file in place of its value."""
        value = self.json(name)
        yield value
        is_marker = name.endswith("complete.json")
        self.replace(name, jsonio.canonical_bytes(value) if is_marker else jsonio.pretty_bytes(value))

    def event(self, key: str, number: int = 0) -> dict[str, Any]:
        """Returns the event of that key and number (from 0; negative from the end)."""
        return [event for event in self.events if event["key"] == key][number]

    def line(self, update: int, attempt: int | None = None) -> dict[str, Any]:
        """Returns the last metrics line of an update, or that of an attempt."""
        return [line for line in self.metrics if line["update"] == update and attempt in (None, line["attempt"])][-1]

    def checkpoints(self) -> list[str]:
        """Returns the names of the checkpoint folders."""
        return sorted(path.name for path in self.root.glob("checkpoint_????????"))

    def write_logs(self) -> None:
        """Writes events and metrics as they are, without sealing."""
        for name, lines in (("events.jsonl", self.events), ("metrics.jsonl", self.metrics)):
            self.replace(name, b"".join(jsonio.canonical_bytes(line) + b"\n" for line in lines))

    def seal_chain(self) -> None:
        """Recomputes the data chain from the row hashes, in lines, events and checkpoints."""
        chains: dict[int, int] = {0: order.initial_chain()}
        for line in self.metrics:
            update = line["update"]
            chains[update] = order.next_chain(chains[update - 1], update, order.from_hex(line["rows_hash"]))
            line["data_chain"] = order.to_hex(chains[update])
        for event in self.events:
            if event["key"] == "checkpoint_saved":
                event["meta"]["data_chain"] = order.to_hex(chains[event["update"]])
        for name in self.checkpoints():
            for file in ("trainer_state.json", "complete.json"):
                with self.edit(f"{name}/{file}") as value:
                    value["data_chain"] = order.to_hex(chains[value["update"]])

    def seal(self) -> None:
        """Recomputes every digest from the files: markers, evaluations, events."""
        renamed: dict[str, str] = {}
        for name in self.checkpoints():
            renamed |= self._seal_checkpoint(name)
        for path in sorted(self.root.glob("evaluations/*.json")):
            content = path.read_text(encoding="utf-8", errors="surrogateescape")
            for old, new in renamed.items():
                content = content.replace(old, new)
            self.replace(f"evaluations/{path.name}", content.encode("utf-8", "surrogateescape"))
        previous = ""
        for number, event in enumerate(self.events):
            for key in ("complete_digest", "weights_digest", "resumed_complete_digest"):
                if event["meta"].get(key) in renamed:
                    event["meta"][key] = renamed[event["meta"][key]]
            file = event["meta"].get("file")
            if event["key"] == "evaluation" and (self.root / file).is_file():
                event["meta"]["file_digest"] = hashlib.sha256(self.bytes(file)).hexdigest()
            event["seq"], event["prev"] = number, previous
            previous = hashlib.sha256(jsonio.canonical_bytes(event)).hexdigest()[:16]
        self.write_logs()

    def _seal_checkpoint(self, name: str) -> dict[str, str]:
        """Recomputes a marker; returns old digest -> new one."""
        if not (self.root / name / "complete.json").is_file():
            return {}
        marker = self.json(f"{name}/complete.json")
        before = {"complete": jsonio.digest(marker), "weights": marker["weights_digest"]}
        # The marker on disk may have been edited already; events know the digest it had.
        saved = [
            event["meta"] for event in self.events if event["key"] == "checkpoint_saved" and event["value"] == name
        ]
        if saved:
            before = {"complete": saved[-1]["complete_digest"], "weights": saved[-1]["weights_digest"]}
        for entry in marker["files"]:
            content = self.bytes(f"{name}/{entry['path']}")
            entry["bytes"], entry["sha256"] = len(content), hashlib.sha256(content).hexdigest()
        with safe_open(str(self.root / name / "model.safetensors"), framework="pt") as file:
            marker["weights_digest"] = weights_digest({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
        self.replace(f"{name}/complete.json", jsonio.canonical_bytes(marker))
        return {before["complete"]: jsonio.digest(marker), before["weights"]: marker["weights_digest"]}
