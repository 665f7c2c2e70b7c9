"""Random damage: the audit always ends with 0, 1 or 2 and valid JSON, and never with 0 if a hashed file changed."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nexttransformer import jsonio
from nexttransformer.audit.reference import Reference
from nexttransformer.audit.report import AuditRecord, audit_run
from nexttransformer.errors import AuditError
from tests.audit.edit import copy_run

NUM_DEFAULT, NUM_ALL = 60, 300
LAST = "checkpoint_00000020"
# Pieces that change the meaning of JSON rather than break it.
PIECES = [
    b"NaN",
    b"1e999",
    b"-1",
    b"null",
    b"[]",
    b"{}",
    b'""',
    b"\x00",
    b"\n",
    b"18446744073709551616",
    b"[[[[",
    b"true",
]


def flip(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def delete(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    return content[:start] + content[start + rng.choice([1, 2, 17, 300]) :]


def insert(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + rng.choice(PIECES) + content[place:]


def swap_number(content: bytes, rng: random.Random) -> bytes:
    digits = [place for place, byte in enumerate(content) if 48 <= byte <= 57] or [0]
    place = rng.choice(digits)
    return content[:place] + rng.choice(PIECES) + content[place + 1 :]


EDITS: list[Callable[[bytes, random.Random], bytes]] = [flip, truncate, delete, insert, swap_number]


def is_hashed(name: str, old: bytes, new: bytes) -> bool:
    """Whether a hash in the run covers this change: checkpoints, evaluations, all events but the last."""
    if name == "events.jsonl":
        before = old.splitlines(keepends=True)[:-1]
        return new.splitlines(keepends=True)[: len(before)] != before
    return name.startswith(("evaluations/", f"{LAST}/"))


@pytest.mark.parametrize(
    "numbers",
    [range(NUM_DEFAULT), pytest.param(range(NUM_DEFAULT, NUM_ALL), marks=pytest.mark.slow)],
    ids=["default", "all"],
)
def test_random_damage(numbers: range, clean_run: Path, tmp_path: Path, reference: Reference) -> None:
    names = sorted(str(path.relative_to(clean_run)) for path in clean_run.rglob("*") if path.is_file())
    # Small files are where the meaning is.
    weights = [1 if name.endswith(".safetensors") else 4 for name in names]
    codes = []
    for number in numbers:
        rng = random.Random(number)
        run = copy_run(clean_run, tmp_path / "run")
        name = rng.choices(names, weights)[0]
        old = run.bytes(name)
        new = rng.choice(EDITS)(old, rng) if rng.random() > 0.05 else None
        if new is None:
            (run.root / name).unlink()
        else:
            run.replace(name, new)
        try:
            record = audit_run(run.root, "dense_full", reference)
        except AuditError:
            pytest.fail(f"{number}: {name}: a run folder was taken for none")
        again = AuditRecord.from_json(jsonio.parse_json(record.to_bytes(), "audit"), "audit")
        assert again == record and record.exit_code in (0, 1, 2)
        if new is None or is_hashed(name, old, new):
            assert record.exit_code != 0 or new == old, f"edit {number} of {name} went unnoticed"
        codes.append(record.exit_code)
        shutil.rmtree(run.root)
    assert set(codes) >= {0, 1}
