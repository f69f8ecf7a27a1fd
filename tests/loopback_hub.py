"""A hub of one repository on the loopback interface: as much of the protocol as huggingface_hub asks for.

To read: the repository's description, its list of files, the files. To write: making it, what is to be sent how, the batch
and the objects of git LFS, and a commit, which puts files into `folder`.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "1234567890abcdef1234567890abcdef12345678"
REPOSITORY = "someone/base"
API = f"/api/models/{REPOSITORY}"
LFS_BYTES = 20_000
"""Files of this size are sent as objects of LFS, and so are all that are no text."""


@dataclass
class Hub:
    folder: Path
    """What the repository holds."""
    token: str | None = None
    """Requests without this token are rejected."""
    refusal: tuple[int, str] = (401, "RepoNotFound")
    """Status and X-Error-Code of a rejected request."""
    revisions: tuple[str, ...] = ("main", COMMIT)
    exists: bool = True
    private: bool = False
    refused_path: str | None = None
    """Requests to paths that hold this are answered with `refusal`, whatever their token."""
    refused_times: float = float("inf")
    """Number of rejected requests; later ones are answered."""
    seen: list[str] = field(default_factory=list)
    """Authorization headers, as they came."""
    asked: list[str] = field(default_factory=list)
    """Method and path of every request."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """LFS objects by SHA-256."""
    commits: list[str] = field(default_factory=list)
    """Their messages."""
    endpoint: str = ""


@contextmanager
def running_hub(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def _answer(self) -> None:
            given = self.headers.get("Authorization", "")
            body = self._body()
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            if self.command == "PUT" and path.startswith("/lfs/"):  # signed by its address, as in an object store
                self._take_object(path.removeprefix("/lfs/"), body)
                return
            hub.seen.append(given)
            is_refused = bool(hub.refused_path and hub.refused_path in path and hub.refused_times > 0)
            hub.refused_times -= is_refused
            if (hub.token and given != f"Bearer {hub.token}") or is_refused:
                self._send(hub.refusal[0], b"", {"X-Error-Code": hub.refusal[1]})
            elif self.command == "POST":
                self._written(path, body)
            elif path == API:
                self._describe("revision", "main")
            elif path.startswith(f"{API}/"):
                self._describe(*path.removeprefix(f"{API}/").split("/", 2))
            else:
                self._file(path.removeprefix(f"/{REPOSITORY}/resolve/").partition("/")[2])

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while length := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(length))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _describe(self, what: str, revision: str, below: str = "") -> None:
            if not hub.exists or revision not in hub.revisions:
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound" if hub.exists else "RepoNotFound"})
            elif what == "revision":
                self._json({"id": REPOSITORY, "sha": COMMIT, "private": hub.private, "siblings": []})
            elif not (hub.folder / below).is_dir():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                files = [path for path in sorted((hub.folder / below).rglob("*")) if path.is_file()]
                entries = [
                    {
                        "type": "file",
                        "path": path.relative_to(hub.folder).as_posix(),
                        "size": path.stat().st_size,
                        "oid": _hash(path),
                    }
                    for path in files
                ]
                self._json(entries)

        def _file(self, name: str) -> None:
            path = hub.folder / name
            if not name or not path.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            self._send(200, path.read_bytes(), {"ETag": f'"{_hash(path)}"', "X-Repo-Commit": COMMIT})

        def _written(self, path: str, body: bytes) -> None:
            match path.removeprefix(API).split("/"):
                case ["", "api", "repos", "create"]:
                    self._create(json.loads(body))
                case ["", "api", "validate-yaml"]:
                    self._json({"errors": [], "warnings": []})
                case ["", "preupload", "main"]:
                    self._json({"files": [_mode(one) for one in json.loads(body)["files"]]})
                case ["", "someone", "base.git", "info", "lfs", "objects", "batch"]:
                    self._json({"transfer": "basic", "objects": list(map(self._wanted, json.loads(body)["objects"]))})
                case ["", "lfs", "verify"]:
                    sent = json.loads(body)
                    self._send(200 if len(hub.objects[sent["oid"]]) == sent["size"] else 422, b"")
                case ["", "commit", "main"]:
                    self._commit([json.loads(line) for line in body.splitlines()])
                case _:
                    self._send(404, b"")

        def _create(self, wanted: dict[str, Any]) -> None:
            assert f"{wanted['organization']}/{wanted['name']}" == REPOSITORY
            if hub.exists:
                self._json(
                    {"error": "You already created this model repo", "url": f"{hub.endpoint}/{REPOSITORY}"}, status=409
                )
                return
            hub.exists, hub.private = True, wanted.get("visibility") == "private"
            self._json({"url": f"{hub.endpoint}/{REPOSITORY}"})

        def _wanted(self, one: dict[str, Any]) -> dict[str, Any]:
            if one["oid"] in hub.objects:
                return one
            places = {"upload": f"/lfs/{one['oid']}", "verify": "/lfs/verify"}
            return one | {"actions": {name: {"href": hub.endpoint + place} for name, place in places.items()}}

        def _take_object(self, oid: str, body: bytes) -> None:
            hub.objects[oid] = body
            self._send(200 if hashlib.sha256(body).hexdigest() == oid else 400, b"")

        def _commit(self, lines: list[dict[str, Any]]) -> None:
            for line in lines:
                value = line["value"]
                if line["key"] == "header":
                    hub.commits.append(value["summary"])
                    continue
                content = base64.b64decode(value["content"]) if line["key"] == "file" else hub.objects[value["oid"]]
                file = hub.folder / value["path"]
                assert hub.folder in file.resolve().parents
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            self._json({"commitUrl": f"{hub.endpoint}/{REPOSITORY}/commit/{COMMIT}", "commitOid": COMMIT})

        def _json(self, value: Any, *, status: int = 200) -> None:
            self._send(status, json.dumps(value).encode())

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (
                {"Content-Length": str(len(body)), "Content-Type": "application/json"} | (headers or {})
            ).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the name of the overridden one)
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    is_text = b"\0" not in base64.b64decode(file["sample"])
    way = "regular" if is_text and file["size"] < LFS_BYTES else "lfs"
    return {"path": file["path"], "uploadMode": way, "shouldIgnore": False, "oid": None}


def _hash(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
