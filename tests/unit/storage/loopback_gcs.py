"""The parts of Google Cloud Storage's JSON API that a lease needs, on loopback: objects with generations and conditions."""

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, tuple[int, bytes]]  # set on a subclass, as the next two
    generations: Iterator[int]
    lock: threading.Lock

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is http.server's)
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        _, _, name = url.path.partition("/o/")
        found = self.objects.get(unquote(name))
        if not name:
            self._answer(200, {"kind": "storage#objects", "items": []})
        elif found is None:
            self._answer(404, {"error": {"message": "No such object"}})
        elif "alt=media" in url.query:
            self._answer(200, found[1])
        else:
            self._answer(200, self._describe(unquote(name), *found))

    def do_POST(self) -> None:
        query = {key: one for key, (one,) in parse_qs(urlsplit(self.path).query).items()}
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if query["uploadType"] == "multipart":
            _, settings, content, _ = data.split(b"--==0==")
            name, data = json.loads(settings.partition(b"\n\n")[2])["name"], content.partition(b"\n\n")[2][:-1]
        else:
            name = query["name"]
        with self.lock:
            generation, _ = self.objects.get(name, (0, b""))
            if int(query.get("ifGenerationMatch", generation)) != generation:
                self._answer(412, {"error": {"message": "conditionNotMet"}})
                return
            self.objects[name] = next(self.generations), data
            self._answer(200, self._describe(name, *self.objects[name]))

    def do_DELETE(self) -> None:
        self.objects.pop(unquote(self.path.partition("/o/")[2].partition("?")[0]), None)
        self._answer(204, b"")

    def _describe(self, name: str, generation: int, data: bytes) -> dict[str, str]:
        return {"name": name, "bucket": "robots", "size": str(len(data)), "generation": str(generation)}

    def _answer(self, status: int, body: Any) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def running_gcs() -> Iterator[str]:
    """Run the server; yield its address."""
    shared = {"objects": {}, "generations": itertools.count(1), "lock": threading.Lock()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), shared))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
