"""Checks over ranks before anything is loaded (F16, F17), and what a formal run demands."""

import dataclasses
from pathlib import Path

import pytest

from nexttransformer import provenance
from nexttransformer.errors import ProtocolError
from nexttransformer.protocol import TEST_V1
from nexttransformer.provenance import CodeIdentity
from nexttransformer.training.options import parse_options
from nexttransformer.training.run_data import check_formal_data, open_data
from nexttransformer.training.run_record import check_formal_code
from nexttransformer.training.startup import RankPlace, layout_problems
from tests.distributed import run_ranks
from tests.training.trainer_runs import SHORT, arguments, train, train_rank


def places(*nodes: tuple[int, str], device: str = "cpu") -> list[RankPlace]:
    """One rank for each (node rank, host)."""
    return [RankPlace(rank, 0, node, host, device) for rank, (node, host) in enumerate(nodes)]


def test_layout_of_a_good_job():
    assert layout_problems(places((0, "a"), (0, "a"), (1, "b"), (1, "b")), num_nodes=2, num_rows=512) == []


@pytest.mark.parametrize(
    ("found", "num_nodes", "text"),
    [
        (places((0, "a"), (0, "a"), (1, "b")), 2, "a (node 0): 2, b (node 1): 1"),
        (places((0, "a"), (0, "b")), None, "Node rank 0 is used by a and b"),
        (places((0, "a"), (0, "a")), 2, "1 nodes answered, the launcher announced 2"),
        (places(*[(0, "a")] * 9), 1, "9 processes, but an update has only 8 rows"),
        (places((0, "a"), (0, "a"), device="cuda:0"), 1, "2 processes on a use cuda:0"),
    ],
)
def test_layout_problems(found, num_nodes, text):
    (line,) = layout_problems(found, num_nodes=num_nodes, num_rows=8)
    assert text in line


def differing_rank(rank: int, world_size: int, words: list[str], what: str) -> tuple[int, str]:
    """Runs `train` where rank 1 has something else than rank 0."""
    if rank == 1:
        if what == "source":
            from nexttransformer import provenance

            provenance.source_digest = lambda files=None: "e" * 64
        elif what == "tokenizer":
            from nexttransformer.data.tokenizer import Tokenizer

            original = Tokenizer.__init__

            def changed(self: Tokenizer, content: bytes, where: str) -> None:
                original(self, content, where)
                self.digest = "f" * 64

            Tokenizer.__init__ = changed
        else:
            words = [*words, "--output", str(Path(words[words.index("--output") + 1]).with_name("elsewhere"))]
    return train_rank(rank, world_size, words, [], SHORT)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "row"),
    [("source", "source           " + "e" * 64), ("tokenizer", "tokenizer        " + "f" * 64), ("folder", "")],
    ids=["source", "tokenizer", "folder"],
)
def test_ranks_that_differ_are_refused(prepared_site, tmp_path, what, row):
    words = arguments(prepared_site, tmp_path / "run", micro_batch=4)
    results = run_ranks(differing_rank, 2, words, what, with_group=False)
    assert [code for code, _ in results] == [2, 2]
    assert results[0] == results[1]
    message = results[0][1]
    if what == "folder":
        assert "rank 1 on" in message and "does not see what rank 0 wrote there" in message
    else:
        assert row in message and "ranks 1 " in message
        # Only rows that differ are printed.
        assert len(message.splitlines()) == 4
    assert not list(tmp_path.glob("run/*"))


def test_formal_runs_refuse_tiny_protocols_and_missing_data(prepared_site, tmp_path):
    ((code, message),) = train(arguments(prepared_site, tmp_path / "run", "--formal"))
    assert code == 2 and "formal-v1: no prepared data" in message
    assert not (tmp_path / "run/run.json").exists()


def test_formal_conditions(prepared_site, tmp_path, monkeypatch):
    options = parse_options(arguments(prepared_site, tmp_path / "run"), {})
    data = open_data(options, check_files=True)
    # The shipped corpus is the published data of test-v1.
    assert check_formal_data(data, TEST_V1) == []
    unpublished = dataclasses.replace(TEST_V1, id="test-v9")
    assert "no published data digests yet" in check_formal_data(data, unpublished)[0]
    repeated = dataclasses.replace(data, manifest=data.manifest.model_copy(update={"is_repeated": True}))
    with pytest.raises(ProtocolError, match="marked as repeated"):
        check_formal_data(repeated, unpublished)
    larger = dataclasses.replace(unpublished, val_final_rows=64)
    with pytest.raises(ProtocolError, match="val_final has 32 rows, expected 64"):
        check_formal_data(data, larger)

    clean = CodeIdentity("0.1.0", "a" * 40, True, "b" * 64)
    monkeypatch.setattr(provenance, "code_identity", lambda config: clean)
    check_formal_code(options)
    dirty = dataclasses.replace(clean, is_clean=False, dirty_files=("src/nexttransformer/protocol.py",))
    monkeypatch.setattr(provenance, "code_identity", lambda config: dirty)
    changed = dataclasses.replace(options, config=options.config.model_copy(update={"qk_gain": 1.3}))
    with pytest.raises(ProtocolError) as caught:
        check_formal_code(changed)
    assert "not a clean commit (src/nexttransformer/protocol.py)" in str(caught.value)
    assert "is not the registered configuration of 'dense_full'" in str(caught.value)
