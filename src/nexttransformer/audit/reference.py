"""What a run is judged by: protocol, published digests, data order, code. Nothing of it comes from the run folder."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from nexttransformer import jsonio, provenance
from nexttransformer.audit.check import Needs
from nexttransformer.audit.code_reference import CodeReference, CommitCode, InstalledCode
from nexttransformer.config import ModelConfig, resolve_method
from nexttransformer.data.manifest import DATA_ORDER_FILE_NAME
from nexttransformer.data.published import load_data_order
from nexttransformer.errors import ConfigError, ProtocolError
from nexttransformer.evaluation.bundle import EXCERPT_FOLDER, TASKS_FILE
from nexttransformer.protocol import (
    BUNDLE_TASKS_DIGESTS,
    EXCERPT_BUNDLE,
    FORMAL_V1,
    PUBLISHED_FOLDER,
    Protocol,
    get_protocol,
)

# Other protocols' runs are never records.
DEMO_PROTOCOLS = ("demo-v1", "test-v1")
# The description of the full bundle, whose rows do not ship with the package; checked by its digest.
FULL_TASKS_FILE = Path(__file__).parent.parent / "resources" / "core_tasks.json"


@dataclass(frozen=True)
class Reference:
    """What the checks compare with.

    Attributes:
        protocol: the protocol of the division.
        published: its published digests, empty while there are none.
        data_order: published {update: chain value}, empty while there are none.
        code: the commit's or the installed package's files.
        data_folder: prepared data given with --data, or None.
        is_deep: whether evaluations are scored again (--deep).
        evidence: folder of published records, for the envelope of N3, or None.
    """

    protocol: Protocol
    published: dict[str, Any]
    data_order: dict[int, int]
    code: CodeReference
    data_folder: Path | None = None
    is_deep: bool = False
    evidence: Path | None = None

    @property
    def division(self) -> str:
        """`formal` or `demo`."""
        return "formal" if self.protocol.id == FORMAL_V1.id else "demo"

    @property
    def mode(self) -> str:
        """The mode that a run of the division must have."""
        return "formal" if self.division == "formal" else "open"

    def require_published(self, key: str) -> Any:
        """Returns a published value; Needs while the protocol has none."""
        if key not in self.published:
            raise Needs(
                f"Needs the published digests of {self.protocol.id}, and there are none yet.", f"published {key}"
            )
        return self.published[key]

    @cached_property
    def core_tasks(self) -> dict[str, Any]:
        """The protocol's CORE bundle as its `tasks.json` describes it, verified by digest."""
        is_excerpt = self.protocol.core_bundle == EXCERPT_BUNDLE
        path = EXCERPT_FOLDER / TASKS_FILE if is_excerpt else FULL_TASKS_FILE
        if jsonio.file_digest(path) != BUNDLE_TASKS_DIGESTS[self.protocol.core_bundle]:
            raise Needs("Needs this package's description of the CORE tasks, which is damaged.", "package resources")
        return jsonio.read_json(path)

    def registered_config(self, commit: str | None, family: str, method: str) -> ModelConfig:
        """Returns the registered configuration of a method in the protocol's sizes: the truth for all model checks.

        Raises:
            Needs: the commit is not at hand, or has no (valid) configuration of that family and method.
        """
        where = f"configs/{family}/{method}.json"
        content = self.code.config(commit, family, method)
        if content is None:
            raise Needs(f"Needs the registered configuration {where}, and there is none; see P2.", "run.json config")
        try:
            return _resolve(content, self.protocol)
        except ConfigError:
            raise Needs(f"Needs {where}, which this package cannot read; see P2.", "run.json config") from None


@lru_cache(maxsize=64)
def _resolve(content: bytes, protocol: Protocol) -> ModelConfig:
    return resolve_method(jsonio.parse_json(content, "config"), protocol)


def make_reference(protocol_id: str, *, data_folder: Path | None = None, is_deep: bool = False) -> Reference:
    """Returns what `audit_run` judges by.

    Raises:
        ProtocolError: unknown protocol, or one whose runs are never records.
    """
    protocol = get_protocol(protocol_id)
    is_formal = protocol.id == FORMAL_V1.id
    if not is_formal and protocol.id not in DEMO_PROTOCOLS:
        raise ProtocolError(
            f"--protocol {protocol_id}: runs of this protocol are for screening and never become records. "
            f"Expected {FORMAL_V1.id}, or {' or '.join(DEMO_PROTOCOLS)} for the demo division."
        )
    order_file = PUBLISHED_FOLDER / protocol.id / DATA_ORDER_FILE_NAME
    root = provenance.repository()
    return Reference(
        protocol=protocol,
        published=protocol.published(),
        data_order=load_data_order(order_file) if order_file.is_file() else {},
        code=CommitCode(root) if is_formal else InstalledCode(),
        data_folder=data_folder,
        is_deep=is_deep,
        evidence=root / "evidence" / "runs" if root else None,
    )
