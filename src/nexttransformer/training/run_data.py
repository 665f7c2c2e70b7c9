"""The prepared data of a run: manifest, tokenizer, rows, and what a formal run demands of them."""

from dataclasses import dataclass
from pathlib import Path

from nexttransformer.data.loader import RowReader, TrainingRows
from nexttransformer.data.manifest import Manifest, check_protocol, load_manifest
from nexttransformer.data.published import differences
from nexttransformer.data.tokenizer import FILE_NAME, Tokenizer, check_vocab_size
from nexttransformer.data.verify import quick_problems
from nexttransformer.errors import DataError, ProtocolError, join_problems
from nexttransformer.protocol import BUNDLE_TASKS_DIGESTS, Protocol
from nexttransformer.training.options import TrainOptions
from nexttransformer.training.run_schema import DataDigests


@dataclass(frozen=True)
class RunData:
    """Opened data; row files are read on first use."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    rows: TrainingRows

    def validation(self, split: str) -> RowReader:
        """Returns the reader of `val_curve` or `val_final`."""
        return RowReader(self.folder, split, manifest=self.manifest)


def data_facts(options: TrainOptions) -> dict[str, str | None]:
    """Returns digests of what this rank sees of the data, for the comparison over ranks; None where unreadable."""
    folder = options.site.data_folder(options.protocol.id)
    try:
        manifest = load_manifest(folder)
    except DataError:
        return {"manifest": None, "tokenizer": None}
    path = options.site.tokenizer or folder / FILE_NAME
    return {"manifest": manifest.digest, "tokenizer": Tokenizer.load(path).digest if path.is_file() else None}


def open_data(options: TrainOptions, *, check_files: bool) -> RunData:
    """Opens the data of the run's protocol.

    Args:
        options: site and protocol.
        check_files: whether to compare names and sizes of all files (one process per node does).

    Raises:
        DataError: not prepared, of other constants, files missing or cut, another tokenizer, too few rows;
            before update 1, naming files and figures.
    """
    protocol = options.protocol
    folder = options.site.data_folder(protocol.id)
    manifest = load_manifest(folder)
    check_protocol(manifest, protocol, folder=folder)
    problems = quick_problems(folder, manifest) if check_files else []
    if problems:
        raise DataError(join_problems(problems))
    path = options.site.tokenizer or folder / FILE_NAME
    tokenizer = Tokenizer.load(path)
    if tokenizer.digest != manifest.tokenizer_digest:
        raise DataError(
            f"{path}: this tokenizer has digest {tokenizer.digest[:12]}, the data in {folder} was made with "
            f"{manifest.tokenizer_digest[:12]}. Use the data's own: set 'tokenizer' to null in the site file."
        )
    check_vocab_size(tokenizer, vocab_size=protocol.vocab_size, where=str(path))
    rows = TrainingRows(folder, protocol)
    rows.check_enough(options.last_update)
    return RunData(folder, manifest, tokenizer, rows)


def check_formal_data(data: RunData, protocol: Protocol) -> list[str]:
    """Refuses data that cannot belong to a formal result; returns a warning while nothing is published.

    Raises:
        ProtocolError: naming every difference.
    """
    manifest = data.manifest
    problems = [f"--formal: {line}" for line in differences(manifest, protocol)]
    if manifest.is_repeated:
        problems.append("--formal: the data is marked as repeated (prepare_data --repeat). Prepare the whole data.")
    wanted = {"val_curve": protocol.val_curve_rows, "val_final": protocol.val_final_rows}
    for split, num_rows in wanted.items():
        if manifest.splits[split].rows != num_rows:
            problems.append(
                f"--formal: {split} has {manifest.splits[split].rows:,} rows, expected {num_rows:,}. "
                "Prepare the whole data."
            )
    if problems:
        raise ProtocolError(join_problems(problems))
    if protocol.published():
        return []
    return [f"--formal: {protocol.id} has no published data digests yet, so this run's result cannot be judged yet."]


def data_digests(data: RunData, protocol: Protocol, *, with_core: bool) -> DataDigests:
    """Returns the digests that the run records."""
    manifest = data.manifest
    return DataDigests(
        manifest=manifest.digest,
        tokenizer=manifest.tokenizer_digest,
        byte_table=manifest.byte_table_digest,
        byte_table_version=protocol.byte_table_version,
        data_order=manifest.data_order_digest,
        val_curve=manifest.splits["val_curve"].digest,
        val_final=manifest.splits["val_final"].digest,
        core_bundle=BUNDLE_TASKS_DIGESTS[protocol.core_bundle] if with_core else None,
    )
