"""The contenders of `benchmarks/mailbox.py`: each can tell, and ask, a counting receiver.

Ours has everything on: authenticated session, numbers, acks, resend buffers, lanes, traces. The
others encode the same messages with msgspec and do nothing else. Ray moves the messages its own
way, as arguments of an actor's methods.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import ssl
import sys
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ratchet.messages import DescribeLineage, LineageDescribed, Message, WireMessage
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.node import Node

KEY = bytes(range(32))


class Counter:
    """The receiver: counts tells; answers an ask for n, n > 0, once it has been told n in all."""

    name = "receiver"

    def __init__(self) -> None:
        self._count = 0
        self._waiting: deque[tuple[int, asyncio.Future[Message]]] = deque()

    def tell(self, message: Message) -> None:
        self._count += 1
        if self._waiting:
            self._settle()

    def ask(
        self, message: Any, *, block: bool = False, timeout: float = 0.0
    ) -> asyncio.Future[Message]:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        wanted = message.versions[0]
        if wanted == 0:
            future.set_result(LineageDescribed(()))
        else:
            self._waiting.append((wanted, future))
            self._settle()
        return future

    def watch(self, watcher: Any) -> None:
        raise NotImplementedError

    def _settle(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._count:
            self._waiting.popleft()[1].set_result(LineageDescribed(()))


class Client(Protocol):
    def tell(self, message: Message) -> None: ...
    def ask(self, message: DescribeLineage) -> Awaitable[Any]: ...


# --- ours


class Log:
    def debug(self, event: str, **fields: Any) -> None: ...
    def info(self, event: str, **fields: Any) -> None: ...

    def warning(self, event: str, **fields: Any) -> None:
        if event != "peer_ended":  # the benchmark is over
            print(event, fields, file=sys.stderr)

    error = warning


class DeadLetters:
    def record(self, *, sender: str | None, receiver: str, message: Any, reason: str) -> None:
        if "stop" not in reason:
            raise AssertionError(reason)


def make_node(
    address: str, name: str, local: Callable[[str], Any], receiver: str | None = None
) -> Node:
    return Node(
        name=name,
        incarnation=uuid.uuid4().hex,
        address=Address.parse(address),
        key=KEY,
        run_id="benchmark",
        local=local,
        locate=lambda wanted: Address.parse(str(receiver)),
        dead_letters=DeadLetters(),
        new_id=lambda: uuid.uuid4().hex,
        random_bytes=os.urandom,
        log=Log(),
    )


class Ours:
    def __init__(self, node: Node) -> None:
        self._ref = node.ref("receiver")

    def tell(self, message: Message) -> None:
        self._ref.tell(message)

    def ask(self, message: DescribeLineage) -> Awaitable[Any]:
        return self._ref.ask(message, block=False, timeout=60.0)


# --- what the others send


class BareTell(msgspec.Struct, tag="t", array_like=True):
    body: WireMessage


class BareAsk(msgspec.Struct, tag="q", array_like=True):
    ask_id: int
    body: WireMessage


class BareAnswer(msgspec.Struct, tag="a", array_like=True):
    ask_id: int
    body: WireMessage


class Plain:
    """Either end of a transport without a session. `_send` writes a whole message."""

    def __init__(self, receiver: Counter | None) -> None:
        self._receiver = receiver
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(BareTell | BareAsk | BareAnswer)
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._ids = itertools.count()

    def _send(self, data: bytes) -> None:
        raise NotImplementedError

    def _handle(self, frame: Any) -> None:
        if type(frame) is BareTell:
            self._receiver.tell(frame.body)
        elif type(frame) is BareAsk:
            future = self._receiver.ask(frame.body)
            future.add_done_callback(
                lambda done: self._write(BareAnswer(frame.ask_id, done.result()))
            )
        else:
            self._asked.pop(frame.ask_id).set_result(frame.body)

    def _write(self, frame: Any) -> None:
        self._send(self._encoder.encode(frame))

    def tell(self, message: Message) -> None:
        self._write(BareTell(message))

    def ask(self, message: DescribeLineage) -> Awaitable[Any]:
        ask_id = next(self._ids)
        future = self._asked[ask_id] = asyncio.get_running_loop().create_future()
        self._write(BareAsk(ask_id, message))
        return future


class Bare(Plain, asyncio.BufferedProtocol):
    """An asyncio Protocol: a length and a message."""

    def __init__(self, receiver: Counter | None) -> None:
        super().__init__(receiver)
        self._buffer = bytearray(256 << 10)
        self._start = self._end = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            self._make_room(0)
        return memoryview(self._buffer)[self._end :]

    def _make_room(self, size: int) -> None:
        held = self._buffer[self._start : self._end]
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        self._buffer[: len(held)] = held
        self._start, self._end = 0, len(held)

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        while self._end - self._start >= 4:
            size = int.from_bytes(self._buffer[self._start : self._start + 4], "big")
            if self._end - self._start - 4 < size:
                if size + 4 > len(self._buffer):
                    self._make_room(size + 4)
                return
            begin = self._start + 4
            self._start = begin + size
            self._handle(self._decoder.decode(memoryview(self._buffer)[begin : begin + size]))

    def _send(self, data: bytes) -> None:
        self._transport.write(len(data).to_bytes(4, "big") + data)


class Zmq(Plain):
    """A pair of DEALER sockets in the loop: ZeroMQ's own thread does the input and output."""

    def __init__(self, receiver: Counter | None, address: str) -> None:
        import zmq

        super().__init__(receiver)
        self._no_block = zmq.NOBLOCK
        self._events, self._readable = zmq.EVENTS, zmq.POLLIN
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        if receiver is None:
            self._socket.connect(address)
        else:
            self._socket.bind(address)
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.get(zmq.FD), self._drain)
        self._scheduled = False

    def _drain(self) -> None:
        self._scheduled = False
        while self._socket.get(self._events) & self._readable:
            self._handle(self._decoder.decode(self._socket.recv(self._no_block)))

    def _send(self, data: bytes) -> None:
        self._socket.send(data, self._no_block)
        if not self._scheduled:  # a send may swallow the edge of the descriptor
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def close(self) -> None:
        import zmq

        self._loop.remove_reader(self._socket.get(zmq.FD))
        self._socket.close()


def tls_context(directory: Path, *, server: bool) -> ssl.SSLContext:
    """Mutual TLS with the certificates that `make_certificates` has left."""
    context = ssl.create_default_context(
        ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH,
        cafile=str(directory / "ca.pem"),
    )
    context.load_cert_chain(directory / "node.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def make_certificates(directory: Path) -> None:
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
        directory / "node.pem"
    )


class RayClient:
    """An actor of Ray on this machine; an ask is a `ray.get`, in a thread of its own."""

    def __init__(self) -> None:
        import ray

        ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)

        class Receiver:
            def put(self, message: Any) -> None:
                del message

            def echo(self, message: Any) -> Any:
                return message

        self._ray = ray
        self._actor = ray.remote(Receiver).remote()
        self._last: Any = None

    def tell(self, message: Message) -> None:
        self._last = self._actor.put.remote(message)

    def ask(self, message: DescribeLineage) -> Awaitable[Any]:
        """Wait for all that was told before, or, for 0, for the echo of the question."""
        if message.versions[0]:
            return asyncio.to_thread(self._ray.get, self._last)
        return _done(self._ray.get(self._actor.echo.remote(message)))

    def close(self) -> None:
        self._ray.shutdown()


def _done(value: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future
