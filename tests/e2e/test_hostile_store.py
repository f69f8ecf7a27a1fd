"""A store that lies: bodies without end, listings without end, redirects to elsewhere. One line, soon, in little memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from measured import Measured, measured

MOST_BYTES = 400 << 20
"""The libraries take up to 250 MB."""
CHUNK = b"10000\r\n" + b"x" * 65536 + b"\r\n"
BUCKET = "robots"


class LyingStore(BaseHTTPRequestHandler):
    """S3 and plain HTTP, path-style; HEAD and listings tell honest sizes unless the lie is in the listing."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    endless: str
    """GETs whose target holds this text have a body without end."""
    redirect: str
    """Where GETs are redirected to instead."""
    seen: list[str]

    def do_HEAD(self) -> None:
        key = urlsplit(self.path).path.removeprefix(f"/{BUCKET}/")
        is_folder = any(one.startswith(f"{key}/") for one in self.objects)  # a web server answers for folders, too
        if key not in self.objects and not is_folder:
            return self._answer(404, b"")
        return self._answer(200, self.objects.get(key, b""))

    def do_GET(self) -> None:
        self.seen.append(self.path)
        target, query = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
        if self.endless and self.endless in self.path:
            return self._send_without_end()
        if "list-type" in query:
            return self._answer(200, self._listing(query.get("prefix", [""])[0]).encode())
        if self.redirect:
            self.send_response(307)
            self.send_header("Location", self.redirect)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        key = target.path.removeprefix(f"/{BUCKET}/")
        return self._answer(200, self.objects[key]) if key in self.objects else self._answer(404, b"")

    def do_PUT(self) -> None:
        key = urlsplit(self.path).path.removeprefix(f"/{BUCKET}/")
        if "If-None-Match" in self.headers and key in self.objects:
            return self._answer(412, b"")
        self.objects[key] = self.rfile.read(int(self.headers["Content-Length"]))
        return self._answer(200, b"")

    def _send_without_end(self) -> None:
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            while True:
                self.wfile.write(CHUNK)
        except OSError:  # the client has closed the connection
            self.close_connection = True

    def _listing(self, prefix: str) -> str:
        rest = [key.removeprefix(prefix) for key in self.objects if key.startswith(prefix)]
        folders = sorted({part.partition("/")[0] for part in rest if "/" in part})
        files = [part for part in rest if "/" not in part]
        parts = [f"<CommonPrefixes><Prefix>{prefix}{one}/</Prefix></CommonPrefixes>" for one in folders]
        parts += [
            f"<Contents><Key>{prefix}{one}</Key><Size>{len(self.objects[prefix + one])}</Size><ETag>1</ETag>"
            f"<LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
            for one in files
        ]
        return f"<ListBucketResult><KeyCount>{len(parts)}</KeyCount>{''.join(parts)}</ListBucketResult>"

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Keep the test's output clean."""


@contextmanager
def running(host: str) -> Iterator[Any]:
    handler: Any = type("Bound", (LyingStore,), {"objects": {}, "endless": "", "redirect": "", "seen": []})
    server = ThreadingHTTPServer((host, 0), handler)
    server.daemon_threads = True
    handler.address = f"http://{host}:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler
    server.shutdown()
    server.server_close()


@pytest.fixture
def store() -> Iterator[Any]:
    with running("127.0.0.1") as handler:
        yield handler


@pytest.fixture
def elsewhere() -> Iterator[Any]:
    """Another host."""
    with running("127.0.0.2") as handler:
        yield handler


def ask(store: Any, *words: object) -> Measured:
    keys = {
        "AWS_ACCESS_KEY_ID": "AKIALOOPBACKLOOPBACK",
        "AWS_SECRET_ACCESS_KEY": "x" * 40,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    return measured(*words, env={**keys, "AWS_ENDPOINT_URL": store.address}, timeout_s=120)


@pytest.mark.parametrize(
    ("scheme", "lie"), [("s3", "body"), ("s3", "listing"), ("s3", "redirect"), ("http", "body"), ("http", "redirect")]
)
def test_inspect_of_a_dataset(store, elsewhere, scheme, lie):
    store.objects |= {"data/meta/info.json": b"{}" + b" " * 200, "data/meta/tasks.parquet": b"PAR1"}
    store.endless = {"body": "meta/info.json", "listing": "list-type", "redirect": ""}[lie]
    store.redirect = f"{elsewhere.address}/latest/meta-data/" if lie == "redirect" else ""
    root = f"s3://{BUCKET}/data" if scheme == "s3" else f"{store.address}/{BUCKET}/data"
    found = ask(store, "inspect", root)
    assert found.code in (1, 2), found.printed
    assert found.peak_bytes < MOST_BYTES
    message = {"redirect": "redirects to another scheme or host are not followed"}.get(lie, "33,554,432 bytes")
    assert message in " ".join(found.printed.split()), found.printed
    assert "Traceback" not in found.printed
    assert elsewhere.seen == []


@pytest.mark.parametrize("endless", ["checkpoints/00000002/manifest.json", "lease.json"])
def test_resume_from_storage(endless, store, dataset_v3, small_base, tmp_path: Path):
    """The manifest of the newest checkpoint, or the lease, has no end, whatever size the listing states."""
    store.objects |= {f"runs/run/{endless}": b"{}"}
    store.endless = endless
    flags = [f"--dataset.root={dataset_v3}", f"--policy.path={small_base}", f"--output_dir={tmp_path / 'run'}"]
    found = ask(store, "train", *flags, f"--storage_path=s3://{BUCKET}/runs", "--batch_size=2")
    assert found.code in (1, 2), found.printed
    assert "33,554,432 bytes" in found.printed
    assert "Traceback" not in found.printed
    assert found.peak_bytes < MOST_BYTES


def test_a_hub_whose_answer_has_no_end(store, small_base, tmp_path: Path):
    store.endless = "/api/"
    flags = ["--dataset.repo_id=someone/data", f"--policy.path={small_base}", f"--output_dir={tmp_path / 'run'}"]
    found = measured("train", *flags, env={"HF_ENDPOINT": store.address, "HF_HUB_OFFLINE": "0"}, timeout_s=120)
    assert (found.code, found.printed.count("\n")) == (2, 1), found.printed
    assert "67,108,864 bytes" in found.printed
    assert found.peak_bytes < MOST_BYTES
