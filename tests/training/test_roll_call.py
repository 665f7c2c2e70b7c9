"""The roll call: a doubled rank names both hosts on all ranks that are there, a missing one has its number."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from nexttransformer.errors import NodeError
from nexttransformer.training.process_place import ProcessPlace
from nexttransformer.training.roll_call import call_roll


def answers(world_size: int, *callers: tuple[int, str], limit_seconds: float = 5.0) -> list[str | None]:
    """Lets (rank, host) call the roll at once; returns each one's refusal, None where all are there."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def call(caller: tuple[int, str]) -> str | None:
        rank, host = caller
        place = ProcessPlace(rank, world_size, 0, 1, rank, world_size, "head", 29500)
        try:
            call_roll(store, place, host, limit_seconds=limit_seconds)
        except NodeError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(callers)) as pool:
        return list(pool.map(call, callers))


def test_everybody_is_there() -> None:
    assert answers(3, (0, "a"), (1, "b"), (2, "c")) == [None, None, None]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (("b", "c"), lambda text: "by b and by c" in text or "by c and by b" in text),
        (("b", "b"), lambda text: "by two launchers on b" in text),
    ],
)
def test_a_doubled_rank_is_named_to_all(hosts: tuple[str, str], expected: Callable[[str], bool]) -> None:
    found = answers(3, (0, "a"), (1, hosts[0]), (1, hosts[1]))
    for text in found:
        assert text is not None and text.startswith("Rank 1 (node rank 1) is used twice, ") and expected(text)


def test_missing_ranks_are_named() -> None:
    found = answers(4, (0, "a"), (2, "b"), limit_seconds=0.3)
    assert all(text is not None and "2 of 4 processes did not come within 0 s" in text for text in found)
    assert all(text is not None and "ranks 1, 3. " in text for text in found)
