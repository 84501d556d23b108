"""A hub on this machine: as much of the protocol as ``huggingface_hub`` needs to push and read a model."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_right"


class Hub(ThreadingHTTPServer):
    """Repositories in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.breaks = False
        """Whether commits fail."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid username or password."}, 401)
        path, repositories = self.path.split("?")[0], self.server.repositories
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'us'}/{asked['name']}"
            repositories.setdefault(name, {})
            self.server.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
            return self.answer({"url": f"{self.server.address}/{name}"})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        name = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            return self.answer({"files": modes})
        if "/commit/" in path:
            if self.server.breaks:
                return self.answer({"error": "the disk of the hub is full"}, 507)
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    value = entry["value"]
                    repositories[name][value["path"]] = base64.b64decode(value["content"])
            address = f"{self.server.address}/{name}/commit/{'1' * 40}"
            return self.answer({"commitUrl": address, "commitOid": "1" * 40, "commitMessage": ""})
        return self.answer({"error": "not here"}, 404)

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/api/whoami-v2":
            right = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return self.answer({"name": "us", "type": "user"}) if right else self.answer({"error": "no"}, 401)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name = "/".join(parts[2:4])
            if name not in self.server.repositories:
                return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            if "revision" in parts and parts[-1] not in ("main", "1" * 40):
                return self.answer({"error": "Revision not found"}, 404, X_Error_Code="RevisionNotFound")
            files = self.server.repositories[name]
            if "tree" in parts:
                return self.answer(
                    [
                        {"type": "file", "path": file, "size": len(content), "oid": "0" * 40}
                        for file, content in files.items()
                    ]
                )
            siblings = [{"rfilename": file} for file in files]
            return self.answer({"id": name, "sha": "1" * 40, "siblings": siblings})
        name, file = "/".join(parts[:2]), "/".join(parts[4:])
        content = self.server.repositories.get(name, {}).get(file)
        if content is None:
            return self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
        digest = hashlib.sha1(content).hexdigest()
        return self.answer(content, ETag=f'"{digest}"', X_Repo_Commit="1" * 40)

    def do_HEAD(self) -> None:
        self.do_GET()


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that answers while the context lasts."""
    hub = Hub()
    Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
