"""The exported folder: writing it beside its final place, and moving it there in one step."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.config import config_from_dict
from nexttransformer.data.tokenizer import FILE_NAME as TOKENIZER_FILE
from nexttransformer.data.tokenizer import Tokenizer
from nexttransformer.errors import AuditError, ConfigError, DataError
from nexttransformer.export.hf_files import transformers_files
from nexttransformer.export.weights import write_weights
from nexttransformer.site_config import SiteConfig
from nexttransformer.training import checkpoint_files as names
from nexttransformer.training.checkpoint_load import EvaluationCheckpoint

CARD_FILE = "README.md"
# What tells an earlier export from anything else.
_OWN_FILES = (names.MODEL_FILE, names.CONFIG_FILE, TOKENIZER_FILE, CARD_FILE)


def find_tokenizer(site: SiteConfig, protocol_id: str, digest: str) -> Tokenizer:
    """Returns the tokenizer that a run was trained with.

    Raises:
        DataError: neither the prepared data's nor the site file's is that one.
    """
    candidates = [site.data_folder(protocol_id) / TOKENIZER_FILE, *([site.tokenizer] if site.tokenizer else [])]
    for path in candidates:
        if path.is_file() and jsonio.file_digest(path) == digest:
            return Tokenizer.load(path)
    tried = ", ".join(str(path) for path in candidates)
    raise DataError(
        f"No tokenizer with digest {digest[:16]}..., the one that the run was trained with: looked at {tried}. "
        "Name a site file with that run's data in --site-config."
    )


def check_destination(folder: Path) -> None:
    """Refuses to replace anything but an empty folder or an earlier export.

    Raises:
        ConfigError: naming the folder.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    is_replaceable = folder.is_dir() and not folder.is_symlink()
    if is_replaceable and any(folder.iterdir()):
        is_replaceable = all((folder / name).is_file() for name in _OWN_FILES)
    if not is_replaceable:
        raise ConfigError(f"--export-dir {folder}: exists and is no earlier export. Name another folder or remove it.")


def write_package(folder: Path, checkpoint: EvaluationCheckpoint, tokenizer: Tokenizer, *, division: str) -> None:
    """Writes weights, configuration, tokenizer and the Transformers form into an empty folder; the card comes later."""
    config = config_from_dict(checkpoint.model_config, f"{checkpoint.path}/{names.CONFIG_FILE}")
    write_weights(folder / names.MODEL_FILE, checkpoint, division=division)
    files = {
        names.CONFIG_FILE: jsonio.pretty_bytes(config.to_dict()),
        TOKENIZER_FILE: tokenizer.content,
        **transformers_files(config, tokenizer, update=checkpoint.marker.update, division=division),
    }
    for name, content in files.items():
        jsonio.write_bytes_atomic(folder / name, content)


def package_digests(folder: Path) -> dict[str, str]:
    """Returns file name -> SHA-256 of everything in an exported folder."""
    return {path.name: jsonio.file_digest(path) for path in sorted(folder.iterdir())}


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder that takes the place of `folder` when the block ends well, and is removed when it does not.

    Raises:
        AuditError: nothing can be written there.
    """
    own = f"{folder.name}.{os.getpid()}"
    made, old = folder.with_name(f".{own}.tmp"), folder.with_name(f".{own}.old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made.mkdir()
    except OSError as problem:
        raise AuditError(f"--export-dir {folder}: cannot be written: {problem.strerror}.") from None
    try:
        yield made
        jsonio.fsync_folder(made)
        if folder.exists():
            os.rename(folder, old)
        os.rename(made, folder)
        jsonio.fsync_folder(folder.parent)
    except OSError as problem:
        raise AuditError(f"--export-dir {folder}: cannot be written: {problem.strerror}.") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
