"""An S3 server on loopback, and in front of it a proxy that counts and misbehaves on demand.

The server is moto's, in server mode: the real protocol over HTTP. A fault has a name and applies to the next
requests that match it; there are no clocks in it: a request that hangs does so until the client hangs up.
"""

import http.client
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moto.server import ThreadedMotoServer

BUCKET = "robots"
ACCESS_KEY, SECRET_KEY = "AKIALOOPBACKLOOPBACK", "a-secret-that-nobody-may-see"
STATUS_CODES = {
    400: "BadThing",
    403: "AccessDenied",
    404: "NoSuchKey",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
}


@dataclass
class Fault:
    kind: str
    """A status as text, or `reset`, `cut` (connection lost in the body), `short` (a shorter body), `hang`, `hang_in_body`."""
    times: int = 1
    """How many requests it hits; -1 for all."""
    method: str = "GET"
    """GET or HEAD; listings are GETs too."""
    part: str = ""
    """Part of the request's target that it must have."""
    first_byte: int = 0
    """It hits only ranges that start here or later."""


@dataclass(frozen=True)
class Seen:
    method: str
    target: str
    range: tuple[int, int] | None
    """Half-open, as requested."""
    sent_bytes: int
    """Bytes of the body that went to the client."""
    is_faulty: bool


@dataclass
class Proxy:
    server: ThreadingHTTPServer
    upstream: tuple[str, int]
    seen: list[Seen] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def storage_options(self, **config: Any) -> dict[str, Any]:
        """Return the options for the server; `config` is passed to botocore."""
        options = {"key": ACCESS_KEY, "secret": SECRET_KEY, "client_kwargs": {"endpoint_url": self.url}}
        return options | ({"config_kwargs": config} if config else {})

    def reset(self) -> None:
        with self.lock:
            self.seen.clear()
            self.faults.clear()

    def gets(self, part: str = "") -> list[Seen]:
        """GETs of objects, in order."""
        return [
            one for one in self.seen if one.method == "GET" and part in one.target and "list-type" not in one.target
        ]

    def take_fault(self, method: str, target: str, first_byte: int) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method == method and fault.part in target and first_byte >= fault.first_byte:
                    fault.times -= 1
                    return fault
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy  # set on a subclass

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is http.server's)
        pass

    def do_GET(self) -> None:
        asked = _range_of(self.headers.get("Range"))
        fault = self.proxy.take_fault(self.command, self.path, asked[0] if asked else 0)
        self._misbehave(fault, asked) if fault else self._forward(asked)

    do_HEAD = do_GET

    def _note(self, asked: tuple[int, int] | None, sent_bytes: int, *, is_faulty: bool) -> None:
        """Record the request before it is answered, so that a test finds it after the answer."""
        with self.proxy.lock:
            self.proxy.seen.append(Seen(self.command, self.path, asked, sent_bytes, is_faulty))

    def _forward(self, asked: tuple[int, int] | None) -> None:
        status, headers, body = self._ask_upstream()
        self._note(asked, len(body), is_faulty=False)
        self._answer(status, headers, body)

    def _ask_upstream(self) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self.proxy.upstream)
        connection.request(self.command, self.path, headers=dict(self.headers))
        response = connection.getresponse()
        body = response.read()
        connection.close()
        hop = ("connection", "transfer-encoding", "date", "server")
        return response.status, {name: value for name, value in response.getheaders() if name.lower() not in hop}, body

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        length = headers.pop("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
        for name, value in (headers | {"Content-Length": length}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _misbehave(self, fault: Fault, asked: tuple[int, int] | None) -> None:
        if fault.kind in ("short", "cut", "hang_in_body"):
            self._send_half(fault, asked)
            return
        self._note(asked, 0, is_faulty=True)
        if fault.kind == "reset":
            self._hang_up()
        elif fault.kind == "hang":
            self._wait_for_client()
        else:
            status = int(fault.kind)
            text = f"<Error><Code>{STATUS_CODES[status]}</Code><Message>made by the test</Message></Error>"
            self._answer(status, {"Content-Type": "application/xml"}, b"" if self.command == "HEAD" else text.encode())

    def _send_half(self, fault: Fault, asked: tuple[int, int] | None) -> None:
        status, headers, body = self._ask_upstream()
        half = body[: len(body) // 2]
        self._note(asked, len(half), is_faulty=True)
        if fault.kind == "short":
            self._answer(status, headers, half)
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(half)
        self.wfile.flush()
        self._hang_up() if fault.kind == "cut" else self._wait_for_client()

    def _hang_up(self) -> None:
        """Close with a reset: no FIN, what is in flight is lost."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _wait_for_client(self) -> None:
        """Say nothing until the client gives up and closes."""
        self.connection.recv(1)
        self.close_connection = True

    def finish(self) -> None:
        with suppress(OSError):  # we or the client closed it before
            super().finish()


def _range_of(header: str | None) -> tuple[int, int] | None:
    if not header:
        return None
    begin, _, last = header.removeprefix("bytes=").partition("-")
    return int(begin), int(last) + 1


@contextmanager
def running_s3() -> Iterator[Proxy]:
    """moto's server with an empty bucket, and the proxy in front of it."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    handler = type("BoundHandler", (Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    host, port = moto.get_host_and_port()
    proxy = handler.proxy = Proxy(server, (host, port))  # pyright: ignore[reportAttributeAccessIssue]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        put(proxy, "", b"")
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        moto.stop()


def put(proxy: Proxy, key: str, data: bytes) -> None:
    """Upload past the proxy; without a key, make the bucket."""
    connection = http.client.HTTPConnection(*proxy.upstream)
    target = f"/{BUCKET}/{key}" if key else f"/{BUCKET}"
    credential = f"Credential={ACCESS_KEY}/20200101/us-east-1/s3/aws4_request"
    headers = {"Authorization": f"AWS4-HMAC-SHA256 {credential}, SignedHeaders=host, Signature=0"}
    connection.request("PUT", target, body=data, headers=headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    connection.close()
