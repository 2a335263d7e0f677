"""A process with one node, for the integration tests of mailboxes.

Run as a module with DIRECTORY, NAME and INCARNATION; the key comes in hex on stdin. Its actor
writes each note that it is told, as a line, into DIRECTORY/NAME.INCARNATION.log, echoes asks, and
on "flood" tells the asker so many notes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from tests.helpers.nodes import Inbox, Letters

from ratchet.messages import AbortLoad, BurnVersion, VersionBurnt
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.node import Node


class PrintLog:
    """Events on stderr."""

    def debug(self, event: str, **fields: Any) -> None:
        del event, fields

    def warning(self, event: str, **fields: Any) -> None:
        sys.stderr.write(f"{event} {fields}\n")
        sys.stderr.flush()

    info = error = warning


class Writer(Inbox):
    """Notes on disk what it is told: what it has written it has had, even if it is killed."""

    def __init__(self, node: Node, path: Path) -> None:
        super().__init__(node.name)
        self._node = node
        self._file = path.open("a", buffering=1)
        self.answer = self._answer

    def tell(self, message: Any) -> None:
        self._file.write(f"{message.version}\n")

    def _answer(self, message: BurnVersion) -> VersionBurnt:
        if message.reason == "flood":
            for number in range(message.version):
                self._node.ref("main").tell(AbortLoad(0, number, "flood"))
        return VersionBurnt(message.version)


def make_node(directory: Path, name: str, incarnation: str, key: bytes, **kwargs: Any) -> Node:
    ids = itertools.count()
    return Node(
        **{
            "name": name,
            "incarnation": incarnation,
            "address": Address.parse(f"unix:{directory}/{name}"),
            "key": key,
            "run_id": "run",
            "local": lambda wanted: None,
            "locate": lambda wanted: Address.parse(f"unix:{directory}/{wanted}"),
            "dead_letters": Letters(),
            "new_id": lambda: f"{incarnation}/{next(ids)}",
            "random_bytes": os.urandom,
            "log": PrintLog(),
            **kwargs,
        }
    )


async def main(directory: Path, name: str, incarnation: str) -> None:
    key = bytes.fromhex(sys.stdin.readline())
    actors: dict[str, Inbox] = {}
    node = make_node(directory, name, incarnation, key, local=actors.get)
    actors[name] = Writer(node, directory / f"{name}.{incarnation}.log")
    await node.start()
    sys.stdout.write("up\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
