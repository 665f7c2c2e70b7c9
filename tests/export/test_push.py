"""`--push` with the real client against a hub on this machine."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest

from nexttransformer.errors import AuditError, ConfigError
from nexttransformer.export.push import check_repository, push_folder
from tests.export.exported import ExportedRun

REPO = "ada/dense-demo"


class Hub(ThreadingHTTPServer):
    """Takes repositories, large files and commits; `tokens` are the accounts it knows."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.token = "hf_example"
        self.repositories: list[str] = []
        self.stored: dict[str, bytes] = {}
        self.commits: list[dict[str, Any]] = []
        self.cards: list[str] = []

    def files(self) -> dict[str, bytes]:
        """Returns what the last commit put into the repository."""
        result = {}
        for entry in self.commits[-1]["entries"]:
            value = entry["value"]
            if entry["key"] == "file":
                result[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                result[value["path"]] = self.stored[value["oid"]]
        return result


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        return

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_PUT(self) -> None:
        self.server.stored[self.path.rsplit("/", 1)[-1]] = self._body()
        self._answer({})

    def do_GET(self) -> None:
        self._answer({"id": REPO, "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        body = self._body()
        path = urlsplit(self.path).path
        if self.headers.get("Authorization") != f"Bearer {self.server.token}" and "/objects/" not in path:
            self._answer({"error": "Invalid credentials"}, 401)
        elif path == "/api/repos/create":
            value = json.loads(body)
            self.server.repositories.append(f"{value['organization']}/{value['name']}")
            self._answer({"url": f"{self.server.address}/{REPO}", "name": REPO})
        elif path == "/api/validate-yaml":
            self.server.cards.append(json.loads(body)["content"])
            self._answer({"errors": [], "warnings": []})
        elif path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            is_large = lambda name: name.endswith(".safetensors")  # noqa: E731
            self._answer(
                {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if is_large(file["path"]) else "regular",
                            "shouldIgnore": False,
                        }
                        for file in files
                    ]
                }
            )
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            uploads = [
                {**each, "actions": {"upload": {"href": f"{self.server.address}/store/{each['oid']}", "header": {}}}}
                for each in objects
            ]
            self._answer({"transfer": "basic", "objects": uploads})
        elif "/commit/main" in path:
            lines = [json.loads(line) for line in body.splitlines() if line]
            header = next(line["value"] for line in lines if line["key"] == "header")
            self.server.commits.append({**header, "entries": [line for line in lines if line["key"] != "header"]})
            url = f"{self.server.address}/{REPO}/commit/{'1' * 40}"
            self._answer({"success": True, "commitOid": "1" * 40, "commitUrl": url, "hookOutput": ""})
        else:
            self._answer({"error": f"unexpected {path}"}, 404)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    server = Hub()
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", server.token)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # The newer storage speaks to further services; the client falls back to plain uploads by itself.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server
    server.shutdown()
    server.server_close()


def test_the_whole_folder_arrives_in_one_commit(exported: ExportedRun, hub: Hub) -> None:
    address = push_folder(exported.package, REPO, exported.record)
    assert address == f"{hub.address}/{REPO}"
    assert hub.repositories == [REPO]
    assert len(hub.commits) == 1
    assert hub.commits[0]["summary"] == f"DEMO dense_full, test-v1, run {exported.record.run_id}"
    assert hub.files() == {path.name: path.read_bytes() for path in exported.package.iterdir()}


def test_a_refused_account_is_one_line(exported: ExportedRun, hub: Hub) -> None:
    hub.token = "another"
    with pytest.raises(AuditError) as caught:
        push_folder(exported.package, REPO, exported.record)
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and text.startswith(f"--push {REPO}: ") and "repeat the command" in text


def test_an_unreachable_hub_is_one_line(
    exported: ExportedRun, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(AuditError, match="The export in .* is complete"):
        push_folder(exported.package, REPO, exported.record)


@pytest.mark.parametrize("repo", ["dense", "a/b/c", "a/b c", "a/-b", "", "a/" + "b" * 120])
def test_names_that_no_repository_has(repo: str) -> None:
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        check_repository(repo)
