"""Checking prepared data: sizes at once, every byte on request; each problem names its file."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.data.manifest import DATA_ORDER_FILE_NAME, Manifest
from nexttransformer.data.reporting import Bar
from nexttransformer.data.shards import Source, file_sha256
from nexttransformer.data.tokenizer import FILE_NAME, Tokenizer
from nexttransformer.errors import DataError


def quick_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Returns what is missing or has a wrong size in a prepared folder; tokenizer and order are hashed."""
    problems = []
    for path, num_bytes, _ in _row_files(folder, manifest):
        problem = _size_problem(path, num_bytes)
        if problem:
            problems.append(problem)
    try:
        tokenizer = Tokenizer.load(folder / FILE_NAME)
        for name, got, expected in (
            ("digest", tokenizer.digest, manifest.tokenizer_digest),
            ("byte table digest", tokenizer.byte_table_digest, manifest.byte_table_digest),
        ):
            if got != expected:
                problems.append(f"{folder / FILE_NAME}: {name} is {got}: expected {expected}.")
        got = jsonio.digest(jsonio.read_json(folder / DATA_ORDER_FILE_NAME, DataError))
        if got != manifest.data_order_digest:
            problems.append(f"{folder / DATA_ORDER_FILE_NAME}: digest is {got}: expected {manifest.data_order_digest}.")
    except DataError as problem:
        problems.append(str(problem))
    return problems


def deep_problems(folder: Path, manifest: Manifest, *, source: Source | None, num_threads: int, bar: Bar) -> list[str]:
    """Returns what differs when every file, and every local shard of the source, is hashed again."""
    wanted = [(path, num_bytes, sha256) for path, num_bytes, sha256 in _row_files(folder, manifest)]
    if source is not None:
        for shard in manifest.shards:
            if shard.name in source.local_bytes:
                wanted.append((source.fetch(shard.name), shard.bytes, shard.sha256))

    def check(entry: tuple[Path, int, str]) -> str | None:
        path, num_bytes, sha256 = entry
        problem = _size_problem(path, num_bytes)
        if problem is None and (got := file_sha256(path)) != sha256:
            problem = f"{path}: SHA-256 is {got}: expected {sha256}."
        return problem

    problems = []
    total = sum(num_bytes for _, num_bytes, _ in wanted)
    with ThreadPoolExecutor(num_threads) as threads:
        for (_, num_bytes, _), problem in zip(wanted, threads.map(check, wanted), strict=True):
            bar.advance(num_bytes, total=total)
            problems += [problem] if problem else []
    sized = set(problems)
    return problems + [problem for problem in quick_problems(folder, manifest) if problem not in sized]


def _row_files(folder: Path, manifest: Manifest) -> Iterator[tuple[Path, int, str]]:
    for name, split in sorted(manifest.splits.items()):
        for file in split.files:
            yield folder / name / file.name, file.rows * manifest.row_tokens * 2, file.sha256
            yield folder / name / file.hashes_name, file.rows * 8, file.hashes_sha256


def _size_problem(path: Path, num_bytes: int) -> str | None:
    if not path.is_file():
        return f"{path}: missing."
    got = path.stat().st_size
    return None if got == num_bytes else f"{path}: {got:,} bytes: expected {num_bytes:,}."
