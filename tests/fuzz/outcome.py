"""What a campaign found: counts, problems, memory, and forbidden acts.

Consumes what the campaign notes and the interpreter's audit events; produces the `Outcome`.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXECUTION = frozenset(
    {
        "compile", "exec", "import", "os.exec", "os.fork", "os.posix_spawn", "os.system",
        "subprocess.Popen", "pickle.find_class", "marshal.loads", "code.__new__", "open",
        "ctypes.dlopen", "socket.connect",
    }
)  # fmt: skip


@dataclass
class Outcome:
    """What became of the frames."""

    sent: Counter[str] = field(default_factory=Counter)
    """frames by who sent them"""
    counts: Counter[str] = field(default_factory=Counter)
    """frames by what became of them"""
    connections: int = 0
    delivered: int = 0
    seconds: float = 0.0
    rss_mib: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """after the first tenth, at the end, and the most ever"""
    problems: list[str] = field(default_factory=list)

    @property
    def frames(self) -> int:
        return self.sent.total()


class Ear:
    """Hears of forbidden acts, while it listens: an audit hook cannot be taken out again."""

    def __init__(self) -> None:
        self.heard: Counter[str] = Counter()
        self.listening = False
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if self.listening and event in EXECUTION:
            self.heard[f"{event} {args!r:.100}"] += 1


EAR = Ear()


def rss_mib() -> float:
    """Memory of this process that is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
