"""A hub of one repository on the loopback interface: as much of the protocol as huggingface_hub asks for."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "1234567890abcdef1234567890abcdef12345678"
REPOSITORY = "someone/base"


@dataclass
class Hub:
    folder: Path
    """What the repository holds."""
    token: str | None = None
    """Without this one, requests are refused."""
    refusal: tuple[int, str] = (401, "RepoNotFound")
    """Status and X-Error-Code of a refused request."""
    revisions: tuple[str, ...] = ("main", COMMIT)
    seen: list[str] = field(default_factory=list)
    """Authorization headers, as they came."""
    endpoint: str = ""


@contextmanager
def running_hub(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            given = self.headers.get("Authorization", "")
            hub.seen.append(given)
            path = unquote(urlsplit(self.path).path)
            if hub.token and given != f"Bearer {hub.token}":
                self._send(hub.refusal[0], b"", {"X-Error-Code": hub.refusal[1]})
            elif path.startswith(f"/api/models/{REPOSITORY}/"):
                self._describe(*path.removeprefix(f"/api/models/{REPOSITORY}/").split("/", 1))
            else:
                self._file(path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/"))

        def _describe(self, what: str, revision: str) -> None:
            if revision not in hub.revisions:
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif what == "revision":
                self._send(200, json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": []}).encode())
            else:
                files = [path for path in sorted(hub.folder.rglob("*")) if path.is_file()]
                entries = [
                    {
                        "type": "file",
                        "path": path.relative_to(hub.folder).as_posix(),
                        "size": path.stat().st_size,
                        "oid": _hash(path),
                    }
                    for path in files
                ]
                self._send(200, json.dumps(entries).encode())

        def _file(self, name: str) -> None:
            path = hub.folder / name
            if not path.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            self._send(200, path.read_bytes(), {"ETag": f'"{_hash(path)}"', "X-Repo-Commit": COMMIT})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (
                {"Content-Length": str(len(body)), "Content-Type": "application/json"} | (headers or {})
            ).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
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


def _hash(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
