"""A small server on this machine that speaks what ``huggingface_hub`` asks of the Hugging Face Hub."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest


class Hub:
    """Models in folders ``owner/name`` below ``root``, served at ``address``.

    Attributes:
        root: The folder of the models.
        address: For ``HF_ENDPOINT``.
        gated: Names of models that are for tokens alone.
        token: The only one that is accepted.
        requests: Method and path of every request so far.
    """

    def __init__(self, root: Path, address: str):
        self.root = root
        self.address = address
        self.gated: list[str] = []
        self.token = "hf_right"
        self.requests: list[str] = []

    def commit(self, name: str) -> str:
        """Returns the commit of a model: a digest of what its folder has."""
        files = sorted(path for path in (self.root / name).iterdir())
        content = b"".join(path.name.encode() + path.read_bytes() for path in files)
        return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """Serves the models below ``root`` until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            if "/resolve/" not in self.path:
                return self.answer(404)
            owner, model, _, revision, file = unquote(self.path).lstrip("/").split("/", 4)
            name = f"{owner}/{model}"
            path = root / name / file
            if not path.parent.is_dir():
                return self.answer(404, error="RepoNotFound")
            if name in hub.gated and self.headers["Authorization"] != f"Bearer {hub.token}":
                return self.answer(401 if self.headers["Authorization"] is None else 403, error="GatedRepo")
            commit = hub.commit(name)
            if revision not in ("main", "v1", commit):
                return self.answer(404, error="RevisionNotFound")
            if not path.is_file():
                return self.answer(404, error="EntryNotFound", commit=commit)
            return self.answer(200, path.read_bytes(), commit=commit)

        def do_POST(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            parts = self.path.strip("/").split("/")
            if self.path == "/api/repos/create":
                wanted = json.loads(body)
                name = f"{wanted['organization']}/{wanted['name']}"
                (root / name).mkdir(parents=True, exist_ok=True)
                return self.answer_json({"url": f"{hub.address}/{name}", "id": name, "name": name})
            name = "/".join(parts[2:4])
            if parts[4] == "preupload":
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                return self.answer_json({"files": files})
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    (root / name / line["value"]["path"]).write_bytes(content)
            commit = hub.commit(name)
            return self.answer_json(
                {"commitUrl": f"{hub.address}/{name}/commit/{commit}", "commitOid": commit}
            )

        def answer_json(self, content: object) -> None:
            self.answer(200, json.dumps(content).encode())

        def answer(self, status: int, content: bytes = b"", *, commit: str = "", error: str = "") -> None:
            self.send_response(status)
            headers = {
                "Content-Length": str(len(content)),
                "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
                "X-Repo-Commit": commit,
                "X-Error-Code": error,
            }
            for key, value in headers.items():
                if value:
                    self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Keeps quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(root, f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub without models, which ``huggingface_hub`` takes for the Hub, with an empty cache of its own."""
    from huggingface_hub import constants

    with serving(tmp_path / "served") as hub:
        home = tmp_path / "home"
        for name, value in {
            "ENDPOINT": hub.address,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub
