"""ClimbMix from the Hugging Face hub: resumed, retried, verified, and only as much as is needed.

Each finished shard has a small record beside it (size, SHA-256), so a later run needs no network for it.
`HF_ENDPOINT` names another hub or mirror; `HF_TOKEN` and the other variables of huggingface_hub work.
"""

import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.data.shards import CLIMBMIX_VALIDATION, Source, file_sha256, shard_name
from nexttransformer.errors import DataError
from nexttransformer.protocol import Protocol

REPOSITORY = "karpathy/climbmix-400b-shuffle"
NUM_ATTEMPTS = 8
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 120.0
NUM_DOWNLOADS = 4
# About 400e9 tokens in 6,543 shards, of which packing keeps about 65 %. Only used to look ahead.
_TOKENS_PER_SHARD = 61_000_000
_CHARACTERS_PER_SHARD = 240_000_000
_KEPT_FRACTION = 0.65


class ClimbMix:
    """Shards of ClimbMix in a local folder, downloaded on demand with a few fetched ahead."""

    def __init__(self, folder: Path, *, num_ahead: int, say: Callable[[str], None]) -> None:
        """Prepares to download.

        Args:
            folder: where shards are kept.
            num_ahead: training shards 0 .. num_ahead - 1 may be fetched before they are asked for.
            say: prints a line.
        """
        self.folder, self.num_ahead, self._say = folder, num_ahead, say
        self._downloads = ThreadPoolExecutor(NUM_DOWNLOADS, thread_name_prefix="download")
        self._started: dict[str, Future[Path]] = {}
        self._stop = threading.Event()

    def source(self) -> Source:
        """Returns the shards in order; the last two validate."""
        training = tuple(shard_name(index) for index in range(CLIMBMIX_VALIDATION[0]))
        validation = tuple(shard_name(index) for index in CLIMBMIX_VALIDATION)
        return Source(
            "climbmix", training, validation, self.fetch, {}, lambda name: recorded_sha256(self.folder / name)
        )

    def fetch(self, name: str) -> Path:
        """Returns the local file of a shard, downloading it and starting on the next ones.

        Raises:
            DataError: if it cannot be had; names the shard and the last problem.
        """
        index = int(name[len("shard_") : -len(".parquet")])
        ahead = range(index + 1, min(index + 1 + NUM_DOWNLOADS, self.num_ahead))
        for wanted in (name, *map(shard_name, ahead)):
            if wanted not in self._started:
                self._started[wanted] = self._downloads.submit(self._fetch, wanted)
        return self._started[name].result()

    def close(self) -> None:
        """Stops downloads that nobody waits for."""
        self._stop.set()
        self._downloads.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, name: str) -> Path:
        if is_verified(self.folder / name):
            return self.folder / name
        pause, reason = FIRST_PAUSE_SECONDS, ""
        for attempt in range(1, NUM_ATTEMPTS + 1):
            try:
                return download_shard(self.folder, name, is_forced=attempt > 1 and (self.folder / name).exists())
            except _passing_errors() as problem:
                reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:200]
            if attempt < NUM_ATTEMPTS:
                self._say(f"{name}: attempt {attempt} of {NUM_ATTEMPTS} failed ({reason}). Again in {pause:.0f} s.")
                if self._stop.wait(pause):
                    break
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise DataError(
            f"{name} of {REPOSITORY} cannot be downloaded: {reason}. Check the network or set HF_ENDPOINT to a "
            "mirror, then repeat the command (finished shards are kept), or give a local copy with --source."
        )


class DamagedDownload(Exception):
    """A finished download has another size or SHA-256 than the hub says."""


def download_shard(folder: Path, name: str, *, is_forced: bool) -> Path:
    """Downloads and verifies one shard, resuming a partial file.

    Args:
        folder: where it goes.
        name: file name in the repository.
        is_forced: fetch again although a file of that name is there (it was damaged).

    Raises:
        DataError: if the hub has no such repository or file, or denies access.
        DamagedDownload: if size or SHA-256 is wrong; the file is removed.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        url = hf_hub_url(REPOSITORY, name, repo_type="dataset", endpoint=endpoint)
        metadata = get_hf_file_metadata(url, endpoint=endpoint)
        path = Path(
            hf_hub_download(
                REPOSITORY,
                name,
                repo_type="dataset",
                revision=metadata.commit_hash,
                local_dir=folder,
                endpoint=endpoint,
                force_download=is_forced,
            )
        )
    except (RepositoryNotFoundError, EntryNotFoundError) as problem:
        raise DataError(f"{name} of {REPOSITORY}: the hub has no such file or denies access: {problem}") from None
    num_bytes, sha256 = path.stat().st_size, file_sha256(path)
    # The hub's tag of a large file is its SHA-256; small files have a git hash instead.
    tag = metadata.etag or ""
    expected = tag if re.fullmatch(r"[0-9a-f]{64}", tag) else sha256
    if (metadata.size or num_bytes) != num_bytes or expected != sha256:
        path.unlink()
        raise DamagedDownload(
            f"got {num_bytes:,} bytes with SHA-256 {sha256[:16]}..., expected {metadata.size} bytes with "
            f"{expected[:16]}..."
        )
    jsonio.write_json_atomic(_record(path), {"bytes": num_bytes, "sha256": sha256, "fetched": int(time.time())})
    return path


def is_verified(path: Path) -> bool:
    """Says whether a shard was downloaded and verified, and still has that size."""
    if not (path.is_file() and _record(path).is_file()):
        return False
    return jsonio.read_json(_record(path), DataError).get("bytes") == path.stat().st_size


def recorded_sha256(path: Path) -> str | None:
    """Returns the SHA-256 a downloaded shard was verified with; None for other files."""
    record = _record(path)
    return jsonio.read_json(record, DataError).get("sha256") if record.is_file() else None


def estimate_shards(protocol: Protocol, rows: int) -> int:
    """Returns about how many training shards `rows` rows and the tokenizer's training need, at least 1."""
    tokens = rows * (protocol.context_tokens + 1) / _KEPT_FRACTION
    return max(1, round(tokens / _TOKENS_PER_SHARD))


def estimate_shards_to_fetch(protocol: Protocol, rows: int) -> int:
    """Returns the training shards `--download-only` fetches: the estimate plus 5 %, and the tokenizer's text."""
    for_tokenizer = -(-protocol.tokenizer_training_characters // _CHARACTERS_PER_SHARD)
    wanted = max(int(1.05 * estimate_shards(protocol, rows)) + 1, for_tokenizer)
    return min(wanted, CLIMBMIX_VALIDATION[0])


def _passing_errors() -> tuple[type[Exception], ...]:
    """Returns the errors after which another attempt makes sense."""
    from huggingface_hub import errors

    # HTTPError is that of the transport (requests or httpx, by version); hf_xet raises RuntimeError,
    # which newer versions wrap.
    of_library = [getattr(errors, name, RuntimeError) for name in ("HTTPError", "XetDownloadError")]
    return (DamagedDownload, OSError, RuntimeError, *of_library)


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified.json")
