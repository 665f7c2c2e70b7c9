"""P1 to P6: protocol, configuration, code, parts, versions, and what must not be published."""

import re
from collections.abc import Iterator
from typing import Any

from nexttransformer import jsonio, provenance
from nexttransformer.audit.cell import guarded
from nexttransformer.audit.check import Finding, check, differs, error, warning
from nexttransformer.audit.code_reference import imports_outside
from nexttransformer.audit.kernel_findings import kernel_findings
from nexttransformer.audit.private_text import find_private
from nexttransformer.audit.run_view import RunView

# Constants that C1 compares.
LENGTH_CONSTANTS = ("num_updates", "global_batch_rows", "context_tokens")
PYTHON_RANGE = ((3, 10), (3, 14))
TORCH_RANGE = ((2, 11), (2, 14))


@check("P1")
def check_protocol(view: RunView) -> Iterator[Finding]:
    """Protocol id, digest and constants in every file."""
    protocol = view.reference.protocol
    constants = {key: value for key, value in protocol.constants().items() if key not in LENGTH_CONSTANTS}
    recorded: list[tuple[str, Any]] = [
        (f"{name} protocol", cell.value.protocol) for name, cell in view.evaluations.items() if cell.value
    ]
    if view.run.value is not None:
        recorded.append(("run.json protocol", view.run.value.protocol))
    for checkpoint in view.checkpoints.values():
        if checkpoint.marker.value is not None:
            recorded.append((f"{checkpoint.marker.where} protocol", checkpoint.marker.value.protocol))
        if checkpoint.state.value is not None:
            where = f"{checkpoint.state.where} digests.protocol"
            yield from differs(
                "The protocol's digest", where, expected=protocol.digest, got=checkpoint.state.value.digests.protocol
            )
        if checkpoint.protocol is not None and checkpoint.protocol.value is not None:
            recorded.append((checkpoint.protocol.where, checkpoint.protocol.value))
        if checkpoint.header is not None and checkpoint.header.value is not None:
            where, got = (
                f"{checkpoint.header.where} metadata.protocol",
                checkpoint.header.value.metadata.get("protocol"),
            )
            yield from differs("The protocol", where, expected=protocol.id, got=got)
    for where, found in recorded:
        yield from differs("The protocol", f"{where}.id", expected=protocol.id, got=found.id)
        yield from differs("The protocol's digest", f"{where}.digest", expected=protocol.digest, got=found.digest)
        if hasattr(found, "constants"):
            kept = {key: value for key, value in found.constants.items() if key not in LENGTH_CONSTANTS}
            for key in sorted(constants.keys() | kept.keys()):
                place = f"{where}.constants.{key}"
                yield from differs("A constant of the protocol", place, expected=constants.get(key), got=kept.get(key))
    for logged, meta in view.attempt_starts:
        where = f"{logged.where} meta.protocol_digest"
        yield from differs("The protocol's digest", where, expected=protocol.digest, got=meta.protocol_digest)
    view.run.get()


@check("P2")
def check_config(view: RunView) -> Iterator[Finding]:
    """The recorded configuration, its digest, and the registered one."""
    run = view.run.get()
    embedded = jsonio.digest(run.config)
    yield from differs(
        "The digest of the recorded configuration", "run.json config_digest", expected=embedded, got=run.config_digest
    )

    def attempts() -> Iterator[Finding]:
        for logged, meta in view.attempt_starts:
            where = f"{logged.where} meta.config_digest"
            yield from differs("The configuration's digest", where, expected=run.config_digest, got=meta.config_digest)

    def checkpoints() -> Iterator[Finding]:
        for checkpoint in view.checkpoints.values():
            if checkpoint.state.value is not None:
                where, got = f"{checkpoint.state.where} digests.config", checkpoint.state.value.digests.config
                yield from differs("The configuration's digest", where, expected=run.config_digest, got=got)
            if checkpoint.config is not None:
                got = jsonio.digest(checkpoint.config.get())
                yield from differs(
                    "The checkpoint's configuration", checkpoint.config.where, expected=run.config_digest, got=got
                )

    def registered() -> Iterator[Finding]:
        path = f"configs/{run.family}/{run.method}.json"
        if view.reference.code.config(run.code.commit, run.family, run.method) is None:
            yield error(
                "The method is not registered at the recorded commit.", path, expected="a configuration", got="none"
            )
            return
        expected = view.config.to_dict()
        for key in sorted(expected.keys() | run.config.keys()):
            where = f"run.json config.{key}"
            yield from differs(
                "The registered configuration", where, expected=expected.get(key), got=run.config.get(key)
            )

    yield from guarded({"attempts": attempts, "checkpoints": checkpoints, "registered": registered})


@check("P3")
def check_code(view: RunView) -> Iterator[Finding]:
    """One clean state of the code, and it is the commit's."""
    run, is_formal = view.run.get(), view.reference.code.is_commit
    report = error if is_formal else warning
    codes = [
        ("run.json code", run.code),
        *((f"{logged.where} meta.code", meta.code) for logged, meta in view.attempt_starts),
    ]
    for where, code in codes:
        if code.commit is None or not re.fullmatch(r"[0-9a-f]{40}", code.commit):
            yield report("No commit is recorded.", f"{where}.commit", expected="40 hex digits", got=code.commit)
        if not code.is_clean:
            yield report("The code was not a clean commit.", f"{where}.is_clean", expected=True, got=False)
        yield from differs(
            "The code of an attempt", f"{where}.source_digest", expected=run.code.source_digest, got=code.source_digest
        )
        if code.commit != run.code.commit:
            yield report(
                "The commit differs between attempts.", f"{where}.commit", expected=run.code.commit, got=code.commit
            )
    for checkpoint in view.checkpoints.values():
        if checkpoint.state.value is not None:
            where, got = f"{checkpoint.state.where} digests.source", checkpoint.state.value.digests.source
            yield from differs("The code of a checkpoint", where, expected=run.code.source_digest, got=got)
    for name, cell in view.evaluations.items():
        if cell.value is not None:
            where, got = f"{name} software.source_digest", cell.value.software.source_digest
            yield from differs("The code of an evaluation", where, expected=run.code.source_digest, got=got)
    listed = provenance.source_digest(dict(run.code.source_files))
    yield from differs(
        "The digest of the listed files", "run.json code.source_digest", expected=listed, got=run.code.source_digest
    )
    known = view.reference.code.package_files(run.code.commit)
    if provenance.source_digest(known) != run.code.source_digest:
        whose = "the recorded commit" if is_formal else "the installed package"
        changed = sorted(
            path
            for path in known.keys() | run.code.source_files.keys()
            if known.get(path) != run.code.source_files.get(path)
        )
        yield error(
            f"The code is not that of {whose}.",
            "run.json code.source_files",
            expected=provenance.source_digest(known),
            got=f"{len(changed)} other files: {', '.join(changed[:5])}",
        )


@check("P4")
def check_parts(view: RunView) -> Iterator[Finding]:
    """The files of the parts in use, and what they import."""
    run, code = view.run.get(), view.reference.code
    for logged, meta in view.attempt_starts:
        where = f"{logged.where} meta.code.parts_digest"
        yield from differs("The parts' digest", where, expected=run.code.parts_digest, got=meta.code.parts_digest)
    known = code.package_files(run.code.commit)
    paths = view.facts.part_files
    for path in paths:
        if path not in known:
            yield error("A part's file is not in the recorded code.", f"run.json config, {path}")
    digest = jsonio.digest(sorted((path, known[path]) for path in paths if path in known))
    yield from differs(
        "The digest of the part files", "run.json code.parts_digest", expected=digest, got=run.code.parts_digest
    )
    for path in paths:
        content = code.package_file(run.code.commit, path)
        try:
            outside = imports_outside(content or b"")
        except (SyntaxError, ValueError):
            outside = ("(cannot be parsed)",)
        for name in outside:
            yield warning("A part imports what is no declared dependency.", path, got=name)


@check("P5")
def check_versions(view: RunView) -> Iterator[Finding]:
    """Versions of all attempts."""
    starts = view.attempt_starts
    first = starts[0][1].versions
    for logged, meta in starts:
        where, found = f"{logged.where} meta.versions", meta.versions
        yield from differs(
            "torch differs between attempts: its version", f"{where}.torch", expected=first.torch, got=found.torch
        )
        yield from differs(
            "FLA differs between attempts: its version", f"{where}.fla", expected=first.fla, got=found.fla
        )
        for name, (low, high), text in (("python", PYTHON_RANGE, found.python), ("torch", TORCH_RANGE, found.torch)):
            match = re.match(r"(\d{1,4})\.(\d{1,4})", text)
            if match is None or not low <= (int(match[1]), int(match[2])) < high:
                wanted = f"{low[0]}.{low[1]} or later, below {high[0]}.{high[1]}"
                yield warning("Outside the supported versions.", f"{where}.{name}", expected=wanted, got=text)
    yield from kernel_findings(view)


@check("P6")
def check_private(view: RunView) -> Iterator[Finding]:
    """GPU names and counts, and no private text in what a record takes over."""
    run = view.run.get()
    for logged, meta in view.attempt_starts:
        where = f"{logged.where} meta"
        yield from differs(
            "The number of devices", f"{where}.gpus", expected=meta.world_size, got=sum(meta.gpus.values())
        )
        if not 1 <= len(meta.hosts) <= max(1, meta.num_nodes):
            yield error(
                "Host hashes do not fit the number of nodes.",
                f"{where}.hosts",
                expected=meta.num_nodes,
                got=len(meta.hosts),
            )
        published = {"gpus": meta.gpus, "versions": meta.versions.model_dump()}
        for path, kind in find_private(published):
            yield error(f"Would publish private text ({kind}).", f"{where}.{path}")
    published = {
        "run_id": run.run_id,
        "method": run.method,
        "family": run.family,
        "config": run.config,
        "code": {"package_version": run.code.package_version, "commit": run.code.commit},
    }
    for path, kind in find_private(published):
        yield error(f"Would publish private text ({kind}).", f"run.json {path}")
    for name, cell in view.evaluations.items():
        if cell.value is not None:
            content = {"software": cell.value.software.model_dump(), "core": None}
            if cell.value.core is not None:
                content["core"] = [task.label for task in cell.value.core.tasks]
            for path, kind in find_private(content):
                yield error(f"Would publish private text ({kind}).", f"{name} {path}")
