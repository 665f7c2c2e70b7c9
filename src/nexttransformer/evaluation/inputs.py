"""What an evaluation reads besides the model: tokenizer, validation rows, CORE bundle, all checked by digest."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.data.loader import RowReader
from nexttransformer.data.manifest import Manifest, check_protocol, load_manifest
from nexttransformer.data.tokenizer import FILE_NAME as TOKENIZER_NAME
from nexttransformer.data.tokenizer import Tokenizer
from nexttransformer.data.workers import default_num_workers
from nexttransformer.errors import ConfigError, DataError, join_problems
from nexttransformer.evaluation.bundle import EXCERPT_FOLDER, Bundle, load_bundle
from nexttransformer.evaluation.preparation import prepare_core
from nexttransformer.evaluation.questions import PromptRules, TaskQuestions
from nexttransformer.protocol import BUNDLE_TASKS_DIGESTS, EXCERPT_BUNDLE, Protocol
from nexttransformer.site_config import SiteConfig
from nexttransformer.training.checkpoint_schema import CheckpointDigests

MAX_WORKERS = 8
MIN_ROWS_FOR_WORKERS = 10_000


@dataclass
class EvaluationInputs:
    """Opened and verified inputs; keep one for all evaluations of a run, it remembers the encoded prompts.

    Attributes:
        protocol: whose constants hold.
        manifest: of the prepared data.
        tokenizer: the one the data was packed with.
        readers: split name -> rows.
        bundle: None where no CORE is wanted.
    """

    protocol: Protocol
    manifest: Manifest
    tokenizer: Tokenizer
    readers: dict[str, RowReader]
    bundle: Bundle | None
    _prepared: dict[tuple[int | None, bool], list[TaskQuestions]] = field(default_factory=dict)

    def core_questions(self, *, limit: int | None, is_strict: bool) -> list[TaskQuestions]:
        """Returns the questions of all tasks; encoded once per process."""
        assert self.bundle is not None
        key = (limit, is_strict)
        if key not in self._prepared:
            rules = PromptRules(
                context_tokens=self.protocol.context_tokens,
                max_prompt_tokens=self.protocol.core_max_prompt_tokens,
                is_strict=is_strict,
            )
            num_workers = _num_workers(self.bundle, limit)
            self._prepared[key] = prepare_core(self.bundle, self.tokenizer, rules, limit=limit, num_workers=num_workers)
        return self._prepared[key]


def _num_workers(bundle: Bundle, limit: int | None) -> int:
    """Processes to encode in: this rank's share of the cores, or none extra for little work."""
    num_rows = sum(task.num_rows if limit is None else min(limit, task.num_rows) for task in bundle.tasks)
    if num_rows < MIN_ROWS_FOR_WORKERS:
        return 1
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, min(MAX_WORKERS, default_num_workers() // num_local_ranks))


def open_inputs(
    site: SiteConfig, protocol: Protocol, *, splits: tuple[str, ...], want_core: bool, site_name: str = "site file"
) -> EvaluationInputs:
    """Opens and hashes everything an evaluation reads.

    Args:
        site: where data and bundle are.
        protocol: constants.
        splits: validation splits to open.
        want_core: whether to load the CORE bundle.
        site_name: name of the site file, for messages.

    Raises:
        DataError: if anything is missing, damaged or prepared for another protocol.
        ConfigError: if the site file names no bundle and the protocol needs one.
    """
    folder = site.data_folder(protocol.id)
    manifest = load_manifest(folder)
    check_protocol(manifest, protocol, folder=folder)
    problems = [problem for split in splits for problem in _split_problems(folder, manifest, split)]
    tokenizer = Tokenizer.load(folder / TOKENIZER_NAME)
    if tokenizer.digest != manifest.tokenizer_digest:
        problems.append(f"{folder / TOKENIZER_NAME}: not the tokenizer that the data was packed with.")
    if problems:
        raise DataError(join_problems(problems))
    return EvaluationInputs(
        protocol=protocol,
        manifest=manifest,
        tokenizer=tokenizer,
        readers={split: RowReader(folder, split, manifest=manifest) for split in splits},
        bundle=open_bundle(site, protocol, site_name=site_name) if want_core else None,
    )


def open_bundle(site: SiteConfig, protocol: Protocol, *, site_name: str = "site file") -> Bundle:
    """Loads the CORE bundle a protocol names: the shipped excerpt, or the one the site file points to."""
    digest = BUNDLE_TASKS_DIGESTS[protocol.core_bundle]
    if protocol.core_bundle == EXCERPT_BUNDLE:
        return load_bundle(EXCERPT_FOLDER, digest)
    if site.core_bundle is None:
        raise ConfigError(
            f"{site_name}: 'core_bundle' is not set, but {protocol.id} evaluates CORE. Name the folder or archive of "
            "the CORE data there, or leave CORE out with '--eval bpb'."
        )
    return load_bundle(site.core_bundle, digest)


def digest_problems(inputs: EvaluationInputs, digests: CheckpointDigests) -> list[str]:
    """Compares opened inputs with the digests a checkpoint was trained under; one line per difference."""
    found = {
        "tokenizer": inputs.tokenizer.digest,
        "byte_table": inputs.tokenizer.byte_table_digest,
        **{split: inputs.manifest.splits[split].digest for split in inputs.readers},
    }
    if inputs.bundle is not None and digests.core_bundle is not None:
        found["core_bundle"] = inputs.bundle.digest
    return [
        f"{name}: the data on this machine has digest {digest[:16]}..., the checkpoint was trained under "
        f"{getattr(digests, name)[:16]}.... Use the data of that run."
        for name, digest in found.items()
        if digest != getattr(digests, name)
    ]


def _split_problems(folder: Path, manifest: Manifest, split: str) -> list[str]:
    """Hashes the row files of a validation split; they are small."""
    problems = []
    for file in manifest.splits[split].files:
        path = folder / split / file.name
        if not path.is_file():
            problems.append(f"{path}: missing. Prepare the data again.")
        elif jsonio.file_digest(path) != file.sha256:
            problems.append(f"{path}: its SHA-256 is not the manifest's: damaged or replaced. Prepare the data again.")
    return problems
