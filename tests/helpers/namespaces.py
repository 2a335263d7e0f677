"""Several hosts on one machine: network namespaces, joined by veth to a switch of the test's own.

The switch is a thread that forwards Ethernet frames between the veth ends. So it can delay a
frame, lose it, or cut a host off without a word, and needs no queueing discipline of the kernel.
Needs root and a kernel with namespaces, veth and packet sockets: `why_not` says what is missing.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import random
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

T = TypeVar("T")

CLONE_NEWNET: Final = 0x40000000
ETH_P_ALL: Final = 3
SIOCETHTOOL: Final = 0x8946
OFFLOADS: Final = (0x17, 0x1F, 0x24)  # tx checksum, TCP segmentation, generic segmentation
FRAME_BYTES: Final = 1 << 16


def why_not() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no ip command"
    name = f"rt{os.getpid()}x"
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "e0", "type", "veth", "peer", "name", "e1")
            _packet_socket(name, "e0").close()
        finally:
            _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError) as error:
        text = getattr(error, "stderr", None) or str(error)
        return f"this kernel has no namespaces, veth or packet sockets: {text.strip()}"
    return None


class Hosts:
    """Hosts 1 to n at 10.77.0.1 to 10.77.0.n, each in a namespace of its own."""

    def __init__(self, num_hosts: int) -> None:
        self._prefix = f"rt{os.getpid()}"
        self._names = [f"{self._prefix}-{i}" for i in range(1, num_hosts + 1)]
        self._switch = Switch(num_hosts)

    def ip(self, host: int) -> str:
        """The address of a host."""
        return f"10.77.0.{host}"

    def at(self, host: int, command: Sequence[str]) -> list[str]:
        """The command, to be run on a host."""
        return ["ip", "netns", "exec", self._names[host - 1], *command]

    def cut(self, host: int) -> None:
        """Drop every frame from and to a host; nobody is told."""
        self._switch.cut.add(host - 1)

    def join(self, host: int) -> None:
        """End the cut."""
        self._switch.cut.discard(host - 1)

    def shape(self, host: int, *, delay_s: float, loss: float) -> None:
        """Delay each frame from and to a host, and lose a share of them."""
        self._switch.shapes[host - 1] = (delay_s, loss)

    @property
    def num_lost(self) -> int:
        """Frames lost by `shape` or `cut`."""
        return self._switch.num_lost

    def __enter__(self) -> Self:
        try:
            _ip("netns", "add", self._prefix)
            for number, name in enumerate(self._names, 1):
                _ip("netns", "add", name)
                port = f"p{number}"
                _ip("-n", self._prefix, "link", "add", port, "type", "veth", "peer", "name", "e0",
                    "netns", name)  # fmt: skip
                _ip("-n", self._prefix, "link", "set", port, "up")
                _ip("-n", name, "addr", "add", f"{self.ip(number)}/24", "dev", "e0")
                _ip("-n", name, "link", "set", "e0", "up")
                _ip("-n", name, "link", "set", "lo", "up")
                _in_namespace(name, lambda: _whole_checksums("e0"))
                self._switch.sockets.append(_packet_socket(self._prefix, port))
            self._switch.start()
        except BaseException:
            self._delete()
            raise
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._switch.stop()
        self._delete()

    def _delete(self) -> None:
        for name in (*self._names, self._prefix):
            if Path("/run/netns", name).exists():
                _ip("netns", "del", name)


class Switch(threading.Thread):
    """Forwards frames between its sockets; `cut` and `shapes` may change at any time."""

    def __init__(self, num_ports: int) -> None:
        super().__init__(name="switch", daemon=True)
        self.sockets: list[socket.socket] = []
        self.cut: set[int] = set()
        self.shapes: dict[int, tuple[float, float]] = {}
        self.num_lost = 0
        self._rng = random.Random(0)
        self._ports: dict[bytes, int] = {}
        self._num_ports = num_ports
        self._loop = asyncio.new_event_loop()

    def run(self) -> None:
        """Forward until `stop`."""
        for port, sock in enumerate(self.sockets):
            self._loop.add_reader(sock, self._read, port, sock)
        self._loop.run_forever()
        for sock in self.sockets:
            self._loop.remove_reader(sock)
            sock.close()
        self._loop.close()

    def stop(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()

    def _read(self, port: int, sock: socket.socket) -> None:
        for _ in range(64):
            try:
                frame, (_, _, kind, *_) = sock.recvfrom(FRAME_BYTES)
            except (BlockingIOError, OSError):
                return
            if kind == socket.PACKET_OUTGOING:  # our own
                continue
            self._ports[frame[6:12]] = port
            to = self._ports.get(frame[:6])
            if to is not None and to != port:
                self._forward(port, to, frame)
            elif frame[0] & 1:  # broadcast and multicast
                for other in range(self._num_ports):
                    if other != port:
                        self._forward(port, other, frame)

    def _forward(self, port: int, to: int, frame: bytes) -> None:
        delay_s = 0.0
        for end in (port, to):
            more_s, loss = self.shapes.get(end, (0.0, 0.0))
            delay_s += more_s
            if end in self.cut or self._rng.random() < loss:
                self.num_lost += 1
                return
        if delay_s:
            self._loop.call_later(delay_s, self._send, to, frame)
        else:
            self._send(to, frame)

    def _send(self, to: int, frame: bytes) -> None:
        try:
            self.sockets[to].send(frame)
        except OSError:  # a full queue loses frames, as switches do
            self.num_lost += 1


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


def _in_namespace(name: str, function: Callable[[], T]) -> T:
    """Call a function in a thread that has moved into a namespace, and end the thread."""
    libc = ctypes.CDLL(None, use_errno=True)

    def moved() -> T:
        with Path("/run/netns", name).open() as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return function()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(moved).result()


def _packet_socket(name: str, device: str) -> socket.socket:
    def opened() -> socket.socket:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        sock.bind((device, 0))
        return sock

    return _in_namespace(name, opened)


def _whole_checksums(device: str) -> None:
    """Let the kernel finish each packet before it sends it: nobody behind a veth would."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for command in OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", device.encode(), ctypes.addressof(value))
            fcntl.ioctl(sock, SIOCETHTOOL, request)
