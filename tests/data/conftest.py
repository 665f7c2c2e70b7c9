"""A tiny protocol, generated shards, and one preparation of `test-v1` shared by the data tests."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nexttransformer.data.pipeline import Request, prepare
from nexttransformer.data.reporting import Reporter
from nexttransformer.data.shards import bundled_source, folder_source
from nexttransformer.protocol import Protocol, get_protocol

WORDS = "the of and to in that was his he with as for had is you not be on at by which have or from this".split()


def make_texts(count: int, *, seed: int) -> list[str]:
    """Returns deterministic texts of 0 to 60 words, some of them with odd characters."""
    draw = random.Random(seed)
    texts = []
    for index in range(count):
        words = [draw.choice(WORDS) for _ in range(draw.randrange(60))]
        texts.append(" ".join(words) + (" naïve café 🐕 12345\n" if index % 7 == 0 else ""))
    return texts


def write_shard(path: Path, texts: list[str], *, row_group: int = 16) -> None:
    """Writes one parquet shard."""
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, compression="zstd", row_group_size=row_group)


@pytest.fixture(scope="session")
def tiny_protocol() -> Protocol:
    """A protocol that generated shards can fill: rows of 17 ids, 300 ids in the vocabulary."""
    return dataclasses.replace(
        get_protocol("test-v1"),
        id="tiny-data",
        context_tokens=16,
        vocab_size=300,
        global_batch_rows=4,
        num_updates=10,
        packing_buffer_documents=20,
        val_curve_rows=6,
        val_final_rows=20,
        tokenizer_training_characters=10_000,
    )


@pytest.fixture
def shard_folder(tmp_path: Path) -> Path:
    """Four generated shards: three for training, the last for validation."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for index in range(4):
        write_shard(folder / f"shard_{index:05d}.parquet", make_texts(50, seed=index))
    return folder


@pytest.fixture
def make_request(tmp_path: Path, tiny_protocol: Protocol, shard_folder: Path) -> Callable[..., Request]:
    """Returns a function that builds a Request; keyword arguments replace its fields."""

    def build(**changes: object) -> Request:
        request = Request(protocol=tiny_protocol, folder=tmp_path / "prepared", source=folder_source(shard_folder))
        return dataclasses.replace(request, **changes)

    return build


@pytest.fixture(scope="session")
def quiet() -> Reporter:
    """A reporter that prints nothing."""
    return Reporter(is_quiet=True)


@pytest.fixture(scope="session")
def prepared_test_v1(tmp_path_factory: pytest.TempPathFactory, quiet: Reporter) -> Path:
    """`test-v1` prepared from the bundled corpus; compared with its published digests on the way."""
    folder = tmp_path_factory.mktemp("data") / "test-v1"
    prepare(Request(protocol=get_protocol("test-v1"), folder=folder, source=bundled_source()), quiet)
    return folder
