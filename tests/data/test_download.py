"""Downloading from a hub on this machine that drops connections and once serves damaged bytes."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from nexttransformer.data import download
from nexttransformer.data.pipeline import Request, prepare
from nexttransformer.data.reporting import Reporter
from nexttransformer.data.shards import file_sha256, shard_name
from nexttransformer.errors import DataError
from nexttransformer.protocol import get_protocol

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PREFIX = f"/datasets/{download.REPOSITORY}/resolve/"


class Hub(ThreadingHTTPServer):
    """Serves files as the hub does; `drops` and `damages` say how often each file fails first."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.drops: Counter[str] = Counter()
        self.damages: Counter[str] = Counter()
        self.requests: list[tuple[str, str, str | None]] = []

    def downloads(self, name: str) -> list[str | None]:
        """Returns the Range header of each download of a file."""
        return [span for method, wanted, span in self.requests if (method, wanted) == ("GET", name)]


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def log_message(self, format: str, *args: object) -> None:
        return

    def _answer(self, *, has_body: bool) -> None:
        name = self.path.rsplit("/", 1)[-1]
        span = self.headers.get("Range")
        self.server.requests.append((self.command, name, span))
        content = self.server.files.get(name)
        if not self.path.startswith(PREFIX) or content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = int(span.split("=")[1].split("-")[0]) if span else 0
        body = content[start:]
        self.send_response(206 if span else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        if span:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not has_body:
            return
        if self.server.drops[name]:
            self.server.drops[name] -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            self.connection.close()
            return
        if self.server.damages[name]:
            self.server.damages[name] -= 1
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.wfile.write(body)


@pytest.fixture
def hub(shard_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The four generated shards as training shards 0 and 1 and both validation shards, plus one more."""
    names = [shard_name(0), shard_name(1), shard_name(6541), shard_name(6542)]
    files = {name: (shard_folder / shard_name(index)).read_bytes() for index, name in enumerate(names)}
    server = Hub({**files, shard_name(2): files[shard_name(0)]})
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "FIRST_PAUSE_SECONDS", 0.01)
    # The client keeps what it has in steps of this many bytes; these shards are smaller than its default.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def climbmix(tmp_path: Path) -> Iterator[download.ClimbMix]:
    said: list[str] = []
    result = download.ClimbMix(tmp_path / "climbmix", num_ahead=1, say=said.append)
    yield result
    result.close()


def test_prepares_from_a_hub_that_fails(
    hub: Hub, climbmix: download.ClimbMix, make_request: Callable[..., Request], quiet: Reporter
) -> None:
    hub.drops[shard_name(0)] = 2
    hub.damages[shard_name(6542)] = 1
    request = make_request(source=climbmix.source())
    manifest = prepare(request, quiet)
    assert manifest.source == "climbmix"
    assert [shard.name for shard in manifest.shards if shard.split == "validation"] == [
        shard_name(6541),
        shard_name(6542),
    ]
    for shard in manifest.shards:
        assert shard.sha256 == hashlib.sha256(hub.files[shard.name]).hexdigest()
    # A dropped connection continues where it broke; a damaged file is fetched again as a whole.
    assert any(span not in (None, "bytes=0-") for span in hub.downloads(shard_name(0)))
    assert len(hub.downloads(shard_name(6542))) >= 2
    # Only the training shards that tokenizer and rows needed were fetched.
    fetched = {name for _, name, _ in hub.requests if name.endswith(".parquet")}
    assert fetched == {shard_name(0), shard_name(6541), shard_name(6542)} | {shard.name for shard in manifest.shards}
    assert not hub.downloads(shard_name(2))

    # The rows do not depend on where the shards came from, and a second run needs no network.
    hub.requests.clear()
    assert prepare(request, quiet) == manifest
    assert climbmix.fetch(shard_name(0)).is_file()
    assert hub.requests == []


def test_finished_shards_are_kept_without_network(hub: Hub, climbmix: download.ClimbMix, tmp_path: Path) -> None:
    path = climbmix.fetch(shard_name(0))
    assert file_sha256(path) == download.recorded_sha256(path)
    hub.requests.clear()
    again = download.ClimbMix(tmp_path / "climbmix", num_ahead=1, say=lambda text: None)
    assert again.fetch(shard_name(0)) == path
    again.close()
    assert hub.requests == []


def test_a_shard_changed_after_its_download_is_refused(
    hub: Hub, climbmix: download.ClimbMix, make_request: Callable[..., Request], quiet: Reporter
) -> None:
    path = climbmix.fetch(shard_name(1))
    other = hub.files[shard_name(1)]
    path.write_bytes(other[:200] + bytes([other[200] ^ 1]) + other[201:])
    with pytest.raises(DataError, match=r"shard_00001.parquet: (changed since it was downloaded|damaged)"):
        prepare(make_request(source=climbmix.source(), rows=100_000), quiet)


def test_a_shard_that_cannot_be_had_is_named(
    hub: Hub, climbmix: download.ClimbMix, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"shard_00005.parquet of karpathy.*no such file"):
        climbmix.fetch(shard_name(5))
    monkeypatch.setattr(download, "NUM_ATTEMPTS", 2)
    hub.damages[shard_name(2)] = 100
    with pytest.raises(DataError, match=r"shard_00002.parquet of .*cannot be downloaded: DamagedDownload.*--source"):
        climbmix.fetch(shard_name(2))
    assert not (climbmix.folder / shard_name(2)).exists()
    assert len(hub.downloads(shard_name(2))) == 2


def test_a_few_shards_are_fetched_ahead(hub: Hub, tmp_path: Path) -> None:
    ahead = download.ClimbMix(tmp_path / "ahead", num_ahead=2, say=lambda text: None)
    ahead.fetch(shard_name(0))
    ahead.fetch(shard_name(1))
    ahead.close()
    assert hub.downloads(shard_name(1)) and not hub.downloads(shard_name(2))


def test_estimates() -> None:
    formal = get_protocol("formal-v1")
    # 24,000,000 rows need about 75e9 document tokens of about 61e6 a shard.
    assert 1200 <= download.estimate_shards(formal, formal.num_rows) <= 1260
    assert download.estimate_shards(formal, 1) == 1
    # Two billion characters for the tokenizer are about nine shards, however few rows are asked for.
    assert download.estimate_shards_to_fetch(formal, 512) == 9
    huge = dataclasses.replace(formal, num_updates=10_000_000)
    assert download.estimate_shards_to_fetch(huge, huge.num_rows) == 6541
