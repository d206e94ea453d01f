"""An S3-compatible server of the tests' own, and a proxy in front of it that makes trouble.

``python -m tests.s3_server`` serves moto on a free port of 127.0.0.1, which it prints, until its input ends.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BUCKET = "noise"

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}
"""What a store in the bucket needs beside AWS_ENDPOINT_URL_S3."""


@contextmanager
def s3_server() -> Iterator[str]:
    """A server in a process of its own, with one empty bucket; gives its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.s3_server"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.communicate()


@dataclass
class Fault:
    """What befalls some of the requests.

    ``answer``: a status and a code instead of an answer, the request does not arrive. ``hang``: there is no answer.
    ``cut``: half of the request arrives, then the connection is cut on both sides. ``lose``: the request is carried
    out, then the connection is cut. ``shorten``: half of the answer arrives. ``strip``: the request loses a header.
    """

    kind: str
    method: str = ""
    """Of the requests; empty: any."""
    path: str = ""
    """A part of their path and query."""
    times: float = float("inf")
    """How many of them."""
    status: int = 503
    code: str = "SlowDown"
    headers: tuple[tuple[str, str], ...] = ()
    header: str = ""
    """Without it a request is left alone."""
    seen: int = 0


@dataclass(frozen=True)
class Request:
    """One that the server answered."""

    method: str
    path: str
    """And query."""
    headers: Message
    answered: int
    """Bytes."""


@dataclass
class Proxy:
    """Passes requests on to a server, but for its faults."""

    port: int
    upstream: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    writing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fault(self, method: str, path: str, headers: Message) -> Fault | None:
        """What befalls a request."""
        with self.lock:
            for fault in self.faults:
                concerned = fault.method in ("", method) and fault.path in path
                if concerned and fault.seen < fault.times and (not fault.header or fault.header in headers):
                    fault.seen += 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: Proxy

    def _handle(self) -> None:
        fault = self.proxy.fault(self.command, self.path, self.headers) or Fault("")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fault.kind == "answer":
            self._answer(fault.status, dict(fault.headers), _error(fault.code) if self.command != "HEAD" else b"")
        elif fault.kind == "hang":
            self.proxy.released.wait()
            self.close_connection = True
        elif fault.kind == "cut":
            self._forward(body[: len(body) // 2], fault, cut=True)
            self.close_connection = True
        else:
            status, headers, data = self._forward(body, fault)
            if fault.kind == "lose":
                self.close_connection = True
                return
            with self.proxy.lock:
                self.proxy.requests.append(Request(self.command, self.path, self.headers, len(data)))
            if fault.kind == "shorten":
                self.close_connection = True
                self._answer(status, {**headers, "Content-Length": str(len(data))}, data[: len(data) // 2])
            else:
                self._answer(status, headers, data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _forward(self, body: bytes, fault: Fault, *, cut: bool = False) -> tuple[int, dict[str, str], bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        if fault.kind == "strip":
            headers = {name: value for name, value in headers.items() if name.lower() != fault.header.lower()}
        connection = http.client.HTTPConnection(self.proxy.upstream.removeprefix("http://"), timeout=60)
        # One write at a time: real storage looks and writes in one step, which the server behind this does in two.
        with self.proxy.writing if self.command in ("PUT", "DELETE") else _nothing():
            try:
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
                if cut:
                    return 0, {}, b""
                answer = connection.getresponse()
                data = answer.read()
            finally:
                connection.close()
        kept = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "date", "server", "transfer-encoding")
        }
        if self.command != "HEAD":
            kept = {name: value for name, value in kept.items() if name.lower() != "content-length"}
        return answer.status, kept, data

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "content-length" not in {name.lower() for name in headers}:
            self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>It is a test.</Message></Error>".encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that is gone."""


@contextmanager
def troubled(upstream: str) -> Iterator[Proxy]:
    """A proxy in front of a server."""
    handler = type("Handler", (_Handler,), {})
    server = _Server(("127.0.0.1", 0), handler)
    handler.proxy = proxy = Proxy(port=server.server_port, upstream=upstream)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    """Serve until the input ends."""
    import boto3
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id="tests",
        aws_secret_access_key="tests",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    print(port, flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
