"""Reading prepared rows: (split, index) or (update, row) -> token ids, whatever the world size.

No state but open files. Every row is compared with its stored 64-bit hash when it is read, so a
flipped byte is refused by file and row at the moment it would be used.

Letters: n rows asked for, T context tokens.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nexttransformer.data import order
from nexttransformer.data.manifest import Manifest, RowFile, check_protocol, load_manifest
from nexttransformer.data.rows import HASH_DTYPE
from nexttransformer.data.token_files import TOKEN_DTYPE, check_ids
from nexttransformer.errors import DataError
from nexttransformer.protocol import Protocol

_REPAIR = "Check all files with 'prepare_data --verify', then prepare the data again."


class RowReader:
    """The rows of one split.

    Attributes:
        manifest: the folder's manifest.
        split: the split's manifest entry.
        num_rows: stored rows.
    """

    def __init__(self, folder: Path, split: str, *, manifest: Manifest | None = None) -> None:
        """Opens a split; row files are opened when first used.

        Raises:
            DataError: if the folder is not prepared or has no such split.
        """
        self.folder = folder
        self.manifest = load_manifest(folder) if manifest is None else manifest
        if split not in self.manifest.splits:
            raise DataError(f"{folder}: no split '{split}': it has {', '.join(sorted(self.manifest.splits))}.")
        self.name = split
        self.split = self.manifest.splits[split]
        self.num_rows = self.split.rows
        self._rows: dict[int, np.ndarray] = {}
        self._hashes: dict[int, np.ndarray] = {}

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns rows as uint16 [n, T + 1], in the order asked for.

        Raises:
            DataError: if a file is missing or short or a row is damaged; names file and row.
            IndexError: if an index is outside 0..num_rows - 1.
        """
        wanted = self._check(indices)
        rows = np.empty((len(wanted), self.manifest.row_tokens), dtype=np.uint16)
        expected = np.empty(len(wanted), dtype=np.uint64)
        for number, places, inside in self._by_file(wanted):
            rows[places] = self._row_file(number)[inside]
            expected[places] = self._hash_file(number)[inside]
        damaged = np.flatnonzero(order.row_hashes(rows) != expected)
        if damaged.size:
            number, row = divmod(int(wanted[damaged[0]]), self.manifest.rows_per_file)
            raise DataError(
                f"{self._path(self.split.files[number].name)}: row {row} (row {int(wanted[damaged[0]])} of "
                f"{self.name}) does not match its stored hash: the file is damaged. {_REPAIR}"
            )
        check_ids(rows, int(self.manifest.constants["vocab_size"]), where=f"{self.folder}: {self.name}")
        return rows

    def hashes(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the stored hashes of rows as uint64 [n]."""
        wanted = self._check(indices)
        hashes = np.empty(len(wanted), dtype=np.uint64)
        for number, places, inside in self._by_file(wanted):
            hashes[places] = self._hash_file(number)[inside]
        return hashes

    def _check(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size and not (0 <= int(wanted.min()) and int(wanted.max()) < self.num_rows):
            raise IndexError(f"{self.name}: rows {int(wanted.min())} to {int(wanted.max())} of {self.num_rows}")
        return wanted

    def _by_file(self, wanted: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Returns (file number, places in `wanted`, rows inside the file) for each file touched."""
        numbers, inside = np.divmod(wanted, self.manifest.rows_per_file)
        return [(int(n), np.flatnonzero(numbers == n), inside[numbers == n]) for n in np.unique(numbers)]

    def _path(self, name: str) -> Path:
        return self.folder / self.name / name

    def _row_file(self, number: int) -> np.ndarray:
        if number not in self._rows:
            file = self.split.files[number]
            path = self._path(file.name)
            shape = (file.rows, self.manifest.row_tokens)
            _check_bytes(path, shape[0] * shape[1] * 2)
            self._rows[number] = np.memmap(path, dtype=TOKEN_DTYPE, mode="r", shape=shape)
        return self._rows[number]

    def _hash_file(self, number: int) -> np.ndarray:
        if number not in self._hashes:
            file: RowFile = self.split.files[number]
            path = self._path(file.hashes_name)
            _check_bytes(path, file.rows * 8)
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != file.hashes_sha256:
                raise DataError(f"{path}: its SHA-256 is not the manifest's: damaged or replaced. {_REPAIR}")
            self._hashes[number] = np.frombuffer(content, dtype=HASH_DTYPE).astype(np.uint64)
        return self._hashes[number]


def _check_bytes(path: Path, expected: int) -> None:
    if not path.is_file():
        raise DataError(f"{path}: missing. {_REPAIR}")
    got = path.stat().st_size
    if got != expected:
        raise DataError(f"{path}: {got:,} bytes: expected {expected:,}. {_REPAIR}")


class TrainingRows:
    """The training rows of a protocol: row i of update u is a pure function of (u, i) and the manifest.

    `update` counts from 0, the update about to be made: update u reads rows u * B .. u * B + B - 1 of the
    run (B rows a batch). In the data chain (`order.next_chain`) the same update has number u + 1. With
    data marked as repeated, row r of the run is stored row r mod R.
    """

    def __init__(self, folder: Path, protocol: Protocol) -> None:
        """Opens the training split.

        Raises:
            DataError: if the folder is not prepared for this protocol.
        """
        self.reader = RowReader(folder, "train")
        self.manifest = self.reader.manifest
        check_protocol(self.manifest, protocol, folder=folder)
        self.protocol = protocol
        self.num_rows = self.reader.num_rows

    def check_enough(self, num_updates: int) -> None:
        """Raises DataError, with figures, if `num_updates` need more rows than are stored and none repeat."""
        batch = self.protocol.global_batch_rows
        needed = num_updates * batch
        if needed > self.num_rows and not self.manifest.is_repeated:
            raise DataError(
                f"{self.reader.folder}: too little training data: {num_updates:,} updates x {batch} rows need "
                f"{needed:,} rows, {self.num_rows:,} are stored ({self.num_rows // batch:,} updates). Prepare more "
                "text, train with fewer --updates, or allow repetition with 'prepare_data --repeat' (never formal)."
            )

    def num_epochs(self, num_updates: int) -> float:
        """Returns how often `num_updates` pass over the stored rows."""
        return num_updates * self.protocol.global_batch_rows / self.num_rows

    def rows(self, update: int, start: int, stop: int) -> np.ndarray:
        """Returns rows start..stop - 1 of an update as uint16 [stop - start, T + 1]."""
        return self.reader.read(self._stored(update, start, stop))

    def hashes(self, update: int, start: int, stop: int) -> np.ndarray:
        """Returns the stored hashes of rows start..stop - 1 of an update as uint64 [stop - start]."""
        return self.reader.hashes(self._stored(update, start, stop))

    def _stored(self, update: int, start: int, stop: int) -> np.ndarray:
        batch = self.protocol.global_batch_rows
        assert update >= 0 and 0 <= start <= stop <= batch, (update, start, stop)
        rows = np.arange(update * batch + start, update * batch + stop, dtype=np.int64)
        return rows % self.num_rows if self.manifest.is_repeated else rows
