"""A small server on this machine that speaks what ``huggingface_hub`` asks of the Hugging Face Hub."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from cvt import CvT, save_huggingface


class Hub:
    """Models in folders ``owner/name`` below ``root``, served at ``address``.

    Attributes:
        root: The folder of the models.
        address: For ``HF_ENDPOINT``.
        gated: Names of models that are for tokens alone.
        token: The only one that is accepted.
        requests: Method and path of every request so far.
    """

    def __init__(self, root: Path, server: ThreadingHTTPServer):
        self.root = root
        self.address = f"http://127.0.0.1:{server.server_port}"
        self._server = server
        self.gated: list[str] = []
        self.token = "hf_right"
        self.requests: list[str] = []

    def downloads(self) -> list[str]:
        """Returns the paths of the files that were fetched."""
        return [path for path in self.requests if path.startswith("GET") and "/resolve/" in path]

    def stop(self) -> None:
        """Ends the service before its time."""
        self._server.shutdown()
        self._server.server_close()

    def publish(self, name: str, model: CvT, **settings: object) -> Path:
        """Adds a model as if transformers had saved it; returns its folder."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the activation is quick_gelu
            save_huggingface(model, self.root / name, **settings)
        path = self.root / name / "config.json"
        content = json.loads(path.read_text(encoding="utf-8")) | {"transformers_version": "4.18.0"}
        path.write_text(json.dumps(content), encoding="utf-8")
        return path.parent

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
            if self.path.startswith("/api/models/"):
                return self.describe(*unquote(self.path.partition("?")[0]).split("/")[3:7])
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

        def describe(self, owner: str, model: str, what: str, revision: str) -> None:
            """Answers what a revision is, or which files it has."""
            folder = root / owner / model
            if not folder.is_dir():
                return self.answer(404, error="RepoNotFound")
            commit = hub.commit(f"{owner}/{model}")
            if revision not in ("main", "v1", commit):
                return self.answer(404, error="RevisionNotFound")
            files = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": path.name}
                for path in sorted(folder.iterdir())
            ]
            names = [{"rfilename": file["path"]} for file in files]
            described = {"id": f"{owner}/{model}", "sha": commit, "siblings": names}
            return self.answer_json(files if what == "tree" else described)

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
    hub = Hub(root, server)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.stop()
