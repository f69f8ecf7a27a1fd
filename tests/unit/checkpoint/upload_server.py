"""The loopback S3 server of the dataset tests, with uploads that can fail."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

from moto.server import ThreadedMotoServer
from unit.storage.loopback_s3 import ACCESS_KEY, SECRET_KEY, Handler, Proxy, put


class UploadHandler(Handler):
    """A fault `hang` reads the body and never answers; `deaf` does not read it."""

    end_of_deafness: threading.Event  # set on a subclass

    def _upload(self) -> None:
        fault = self.proxy.take_fault(self.command, self.path, 0)
        if fault and fault.kind == "deaf":
            self._note(None, 0, is_faulty=True)
            self.end_of_deafness.wait(60)  # the client's bytes stay in the socket
            self.close_connection = True
            return
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._misbehave(fault, None) if fault else self._forward(None)

    do_PUT = do_POST = do_DELETE = _upload

    def _ask_upstream(self) -> tuple[int, dict[str, str], bytes]:
        if self.command in ("GET", "HEAD"):
            return super()._ask_upstream()
        connection = http.client.HTTPConnection(*self.proxy.upstream)
        connection.request(self.command, self.path, body=self._body, headers=dict(self.headers))
        response = connection.getresponse()
        body = response.read()
        connection.close()
        hop = ("connection", "transfer-encoding", "date", "server", "content-length")
        return response.status, {name: value for name, value in response.getheaders() if name.lower() not in hop}, body


@contextmanager
def running_upload_server() -> Iterator[Proxy]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    end = threading.Event()
    handler = type("BoundHandler", (UploadHandler,), {"end_of_deafness": end})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    host, port = moto.get_host_and_port()
    proxy = handler.proxy = Proxy(server, (host, port))  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        put(proxy, "", b"")
        yield proxy
    finally:
        end.set()
        server.shutdown()
        server.server_close()
        moto.stop()


def environment(proxy: Proxy) -> dict[str, str]:
    """Return the environment variables that select the server."""
    return {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
