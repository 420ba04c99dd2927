"""A hub on this machine: the parts of its HTTP protocol that huggingface_hub uses to find and download a model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """Models, and the requests for them.

    Args:
        url: where it listens.
        models: OWNER/NAME → revision (branch or tag) → commit.
        folders: commit → the folder with its files.
        requests: "METHOD path" of every request.
        cuts: file name → how many bytes of each of its next answers are sent before the connection is cut.
    """

    url: str
    models: dict[str, dict[str, str]] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    cuts: dict[str, list[int]] = field(default_factory=dict)

    def publish(self, name: str, folder: Path, revision: str = "main") -> str:
        """Makes a folder the newest commit of a branch or tag; its commit."""
        commit = hashlib.sha1(f"{name}/{len(self.folders)}".encode(), usedforsecurity=False).hexdigest()
        self.folders[commit] = folder
        self.models.setdefault(name, {})[revision] = commit
        return commit

    def commit(self, name: str, revision: str) -> str | None:
        """The commit of a revision; None where there is none."""
        known = self.models[name]
        return known.get(revision) or (revision if revision in self.folders else None)

    def environment(self, home: Path, *, offline: bool = False) -> dict[str, str]:
        """What a process needs to ask this hub, with a cache of its own."""
        off = {"HF_HUB_OFFLINE": "1" if offline else "0"}
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | off


@contextmanager
def served() -> Iterator[Hub]:
    """An empty hub that listens on the loopback interface until the end."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        matched = re.fullmatch(r"(/api/models)?/([^/]+/[^/]+)(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?", path)
        if matched is None or matched[2] not in hub.models:
            return self._refuse("RepoNotFound")
        _, name, kind, revision, file = matched.groups()
        commit = hub.commit(name, revision or "main")
        if commit is None:
            return self._refuse("RevisionNotFound")
        if kind == "resolve":
            return self._file(hub, commit, file)
        files = sorted(file for file in hub.folders[commit].iterdir() if file.is_file())
        if kind == "tree":
            return self._json([_entry(file) for file in files])
        return self._json({"id": name, "sha": commit, "siblings": [{"rfilename": file.name} for file in files]})

    def _file(self, hub: Hub, commit: str, name: str) -> None:
        file = hub.folders[commit] / name
        if not file.is_file():
            return self._refuse("EntryNotFound", {"X-Repo-Commit": commit})
        content, etag = file.read_bytes(), _hash(file)
        byte_range = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(byte_range[1]) if byte_range else 0
        self.send_response(206 if byte_range else 200)
        if byte_range:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            cuts = hub.cuts.get(name)
            if cuts:
                self.wfile.write(content[start : start + cuts.pop(0)])
                self.close_connection = True
            else:
                self.wfile.write(content[start:])

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, code: str, more: Mapping[str, str] = {}) -> None:
        self.send_response(404)
        for header, value in {"X-Error-Code": code, "Content-Length": "0", **more}.items():
            self.send_header(header, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _hash(file: Path) -> str:
    """SHA-256 of weights, as of git-lfs; SHA-1 of a git object of other files."""
    content = file.read_bytes()
    if file.suffix == ".safetensors":
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _entry(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    entry: dict[str, Any] = {"type": "file", "path": file.name, "size": size, "oid": _hash(file)}
    if file.suffix == ".safetensors":
        entry["lfs"] = {"oid": _hash(file), "size": size, "pointerSize": 130}
    return entry
