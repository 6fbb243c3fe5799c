"""Connections that are slow, endless or no HTTP at all, with either of uvicorn's parsers.

The application is the whole one, in this process and without a model, which none of this needs.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest
import uvicorn

from pagedllm import Config
from pagedllm_server.app import create_app
from pagedllm_server.cli import transport
from pagedllm_server.connection import MOST_HEAD, protocol_class, room_for_connections
from pagedllm_server.metrics import Metrics
from pagedllm_server.options import ServerOptions
from pagedllm_server.service import Service
from pagedllm_server.sse import EventStream
from server_process import wait_until

SECONDS = 0.25
"""What clients are given here."""
JSON = "Content-Type: application/json\r\n"


class Here:
    """A server in a thread, and how many of its endless answers are being made."""

    def __init__(self, parser, **options):
        self.options = ServerOptions(port=0, client_timeout=SECONDS, **options)
        metrics = Metrics("none")
        service = Service(Config(model="none"), self.options, metrics)
        app = create_app(service, metrics, self.options)
        self.streaming = 0

        @app.get("/endless")
        async def endless(size: int, pause: float = 0) -> EventStream:
            async def pieces():
                while True:
                    yield b"x" * size
                    await asyncio.sleep(pause)

            async def close():
                self.streaming -= 1

            self.streaming += 1
            return EventStream(pieces(), close)

        self.settings = transport(app, self.options, parser)
        self.server = uvicorn.Server(self.settings)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        with asyncio.Runner(loop_factory=self.settings.get_loop_factory()) as runner:
            runner.run(self.server._serve([self.listener]))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()

    @contextmanager
    def client(self, *sent, buffer=None):
        with socket.socket() as connection:
            if buffer is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            connection.connect(self.address)
            connection.settimeout(60)
            for part in sent:
                connection.sendall(part.encode() if isinstance(part, str) else part)
            yield connection

    def ask(self, *sent):
        """The status, the headers and the body of an answer after which the server closes."""
        with self.client(*sent) as connection:
            return answer(everything(connection))

    def is_well(self):
        status, _, body = self.ask("GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return status == 503 and "loading" in body.decode()


def everything(connection):
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def answer(received):
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), received[:200]
    return int(head[9:12]), head.decode().lower(), body


def post(path, length):
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{JSON}Content-Length: {length}\r\n\r\n"


@pytest.fixture(scope="module", params=["httptools", "h11"])
def here(request):
    with Here(request.param) as running:
        yield running


@pytest.fixture(autouse=True)
def _well_afterwards(request):
    yield
    if "here" in request.fixturenames:
        assert request.getfixturevalue("here").is_well()


# -- requests -------------------------------------------------------------------------


CHUNKED = post("/generate", 0).replace("Content-Length: 0", "Transfer-Encoding: chunked")
HEALTH = "GET /health HTTP/1.1\r\nHost: x\r\n"
STALLED = {
    "nothing": ([""], None),
    "a method": (["GET"], None),
    "a line": (["GET /health HTTP/1.1\r\n"], None),
    "a header's name": ([HEALTH, "X-Rest: "], None),
    "a body": ([post("/generate", 5000), "{"], 408),
    "an OpenAI body": ([post("/v1/completions", 5000), "{"], 408),
    "a chunked body": ([CHUNKED, '5\r\n{"in'], 408),
    # Answered at once; what is still to come of the request is not waited for.
    "a body that nobody reads": ([HEALTH, "Content-Length: 9\r\n\r\n"], 503),
}


def test_what_stalls_is_not_waited_for(here):
    """A body that does is answered in its route's form, anything else without a word."""
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(here.client(*sent)) for name, (sent, _) in STALLED.items()
        }
        found = {name: everything(client) for name, client in clients.items()}
    for name, (_, status) in STALLED.items():
        if status is None:
            assert found[name] == b"", name
            continue
        assert answer(found[name])[0] == status, name
        if status == 408:
            _, head, body = answer(found[name])
            assert "connection: close" in head
            said = json.loads(body)["error"]
            if "OpenAI" in name:
                assert said["code"] == "timeout"
                said = said["message"]
            assert "client_timeout" in said


@pytest.mark.parametrize("headers", [True, False])
def test_a_byte_now_and_then_is_not_enough(here, headers):
    begun = HEALTH if headers else post("/generate", 100_000)
    with here.client(begun) as connection:
        connection.settimeout(SECONDS / 10)
        received = None
        for index in range(1000):
            connection.sendall(f"X-{index}: y\r\n".encode() if headers else b" ")
            with suppress(TimeoutError):
                received = connection.recv(65536)
                break
    assert received is not None
    assert received[9:12] == (b"" if headers else b"408")


def test_a_connection_may_idle_between_requests(here):
    with here.client(HEALTH, "\r\n") as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 503")
        time.sleep(1.5 * SECONDS)
        connection.sendall(f"{HEALTH}\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 503")
        connection.sendall(HEALTH[:5].encode())
        assert b"HTTP/" not in everything(connection)  # half of the next is not waited for


def test_an_answer_may_take_longer_than_a_request(here):
    with here.client("GET /endless?size=1&pause=0.1 HTTP/1.1\r\nHost: x\r\n\r\n") as connection:
        end = time.monotonic() + 1.5 * SECONDS
        while time.monotonic() < end:
            assert connection.recv(65536)
    wait_until(lambda: here.streaming == 0)


# -- answers --------------------------------------------------------------------------


def test_a_client_that_takes_nothing_is_hung_up_on(here):
    """Whether its answer comes in large pieces or in such as no buffer is full of soon."""
    asks = [f"GET /endless?size={size} HTTP/1.1\r\nHost: x\r\n\r\n" for size in (100, 100_000)]
    with here.client(asks[0], buffer=1024) as one, here.client(asks[1], buffer=1024) as other:
        wait_until(lambda: here.streaming == 2)
        wait_until(lambda: here.streaming == 0)
        for connection in (one, other):
            with pytest.raises(ConnectionResetError):
                everything(connection)


def test_a_client_that_takes_little_is_not(here):
    """Far less than the kernel gives in one piece to a socket whose buffer is full."""
    ask = "GET /endless?size=10000 HTTP/1.1\r\nHost: x\r\n\r\n"
    with here.client(ask, buffer=1024) as connection:
        wait_until(lambda: here.streaming == 1)
        end, total = time.monotonic() + 2.5 * SECONDS, 0
        while time.monotonic() < end:
            total += len(connection.recv(1024))
            time.sleep(SECONDS / 25)
        assert here.streaming == 1
        assert total < 1_000_000
    wait_until(lambda: here.streaming == 0)


def test_hanging_up_ends_the_first_of_several_requests(here):
    """The second one waits behind it, and its end was all that was told."""
    ask = "GET /endless?size=1&pause=0.01 HTTP/1.1\r\nHost: x\r\n\r\n"
    with here.client(ask * 2):
        wait_until(lambda: here.streaming == 1)
    wait_until(lambda: here.streaming == 0)
    assert here.streaming == 0  # and the second one has not begun either


# -- what is no request ---------------------------------------------------------------


@pytest.mark.parametrize(("path", "openai"), [("/generate", False), ("/v1/models", True)])
@pytest.mark.parametrize("complete", [True, False])
def test_large_headers_are_refused(here, path, openai, complete):
    end = "\r\n\r\n" if complete else ""
    large = "a" * (MOST_HEAD if complete else 4 * 1024 * 1024)
    status, head, body = here.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\nX-A: ", large, end)
    assert status == 431
    assert "connection: close" in head
    found = json.loads(body)["error"]
    if openai and complete:
        assert found["code"] == "headers_too_large"
    assert str(MOST_HEAD) in str(found)


def test_many_headers_and_a_long_path_are_refused(here):
    many = "".join(f"X-{index}: {'v' * 50}\r\n" for index in range(2000))
    assert here.ask(f"GET /health HTTP/1.1\r\nHost: x\r\n{many}\r\n")[0] == 431
    path = "/" + "a" * (MOST_HEAD - 100)
    assert here.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\nX-A: {'v' * 100}\r\n\r\n")[0] == 431


def test_headers_below_the_bound_are_taken(here):
    many = "".join(f"X-{index}: {'v' * 50}\r\n" for index in range(1000))
    ask = f"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{many}\r\n"
    assert here.ask(ask)[0] == 503


def test_trailers_without_an_end_are_refused(here):
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n"
    with here.client(head, "2\r\n{}\r\n0\r\n") as connection:
        with pytest.raises((ConnectionResetError, BrokenPipeError)):  # noqa: PT012
            for _ in range(10_000):
                connection.sendall(b"X-Trailer: yes\r\n" * 1000)
        connection.close()


def test_requests_that_nobody_waits_for_are_not_kept(here):
    """Thousands in one piece; those of one connection are answered one after another."""
    with (
        suppress(ConnectionResetError),
        here.client("GET /endless?size=1&pause=0.01 HTTP/1.1\r\nHost: x\r\n\r\n") as connection,
    ):
        wait_until(lambda: here.streaming == 1)
        connection.sendall(f"{HEALTH}\r\n".encode() * 5000)
        if "H11" not in str(here.server.config.http_protocol_class.__mro__):  # which keeps bytes
            everything(connection)
    wait_until(lambda: here.streaming == 0)
    assert here.ask(HEALTH + "Connection: close\r\n\r\n")[0] == 503  # the others are served


def test_what_is_no_http_is_said_so(here):
    status, _, body = here.ask("HELLO\r\n\r\n")
    assert (status, body) == (400, b"Invalid HTTP request received.")


UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


def test_web_sockets_are_refused(here):
    with here.client(
        "GET /generate HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ) as connection:
        status, _, body = answer(connection.recv(65536))
    assert status == 400
    assert "WebSocket" in body.decode()


@pytest.mark.parametrize("apart", [False, True])
def test_clients_that_would_rather_speak_http2_are_served(here, apart):
    """Java's own client asks for it, with a body; the body was lost."""
    body = '{"inputs": 12}'
    head = post("/tokenize", len(body)).replace("\r\n\r\n", f"\r\nUpgrade: h2c\r\n{UPGRADE}\r\n")
    after = "GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with here.client(head) as connection:
        if apart:
            time.sleep(0.05)
        connection.sendall((body + after).encode())
        received = everything(connection).decode()
    assert re.findall(r"HTTP/1\.1 (\d+)", received) == ["422", "404"]
    assert "inputs" in received


def test_a_server_is_no_proxy(here):
    ask = "CONNECT example.com:80 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert here.ask(ask)[0] in (400, 404, 405)


# -- descriptors ----------------------------------------------------------------------


def test_the_limit_on_open_files_is_raised():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        room = room_for_connections()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == min(hard, 65_536)
        assert 0 < room < soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_connections_than_there_is_room_for_are_told_to_come_back(here):
    server = here.server
    plain = server.config.http_protocol_class
    parser = "h11" if "H11" in str(plain.__mro__) else "httptools"
    server.config.http_protocol_class = protocol_class(SECONDS, 2, parser)
    try:
        with here.client(), here.client():
            wait_until(lambda: len(server.server_state.connections) == 2)
            with here.client() as connection:
                status, head, body = answer(everything(connection))
            assert status == 429
            assert "retry-after: " in head
            assert "connections" in body.decode()
    finally:
        server.config.http_protocol_class = plain
