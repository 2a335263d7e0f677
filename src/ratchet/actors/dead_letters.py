"""Where a process counts the messages that could not be delivered.

Consumes one letter at a time, from any thread; produces a line in the log and the counts that
`ratchet status` shows. Waits for nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Final

from ratchet.observability.logs import Log
from ratchet.status import DeadLetterRow

_MAX_LETTERS: Final = 1024
_OTHERS: Final = "(others)"


class DeadLetterBox:
    """Counts what could not be delivered, by (sender, receiver, type, reason), and logs a warning.

    A reason may be free text: beyond `_MAX_LETTERS` different letters, new ones are counted
    together, by type.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str | None, str, str, str]] = Counter()

    @property
    def counts(self) -> dict[tuple[str, str, str], int]:
        """How often, by (receiver, message type, reason)."""
        counts: Counter[tuple[str, str, str]] = Counter()
        with self._lock:
            for (_, *letter), count in self._counts.items():
                counts[letter[0], letter[1], letter[2]] += count
        return dict(counts)

    @property
    def total(self) -> int:
        """How many in all."""
        with self._lock:
            return self._counts.total()

    def most_frequent(self, num: int) -> tuple[DeadLetterRow, ...]:
        """The letters that were counted most often, with who sent them."""
        with self._lock:
            most = self._counts.most_common(num)
        return tuple(DeadLetterRow(*letter, count) for letter, count in most)

    def record(self, *, sender: str | None, receiver: str, message: Any, reason: str) -> None:
        """Note one message. Its content is not logged: it may be large."""
        kind = type(message).__name__
        letter = (sender, receiver, kind, reason)
        with self._lock:
            if letter not in self._counts and len(self._counts) >= _MAX_LETTERS:
                letter = (None, _OTHERS, kind, _OTHERS)
            self._counts[letter] += 1
            count = self._counts[letter]
        self._log.warning(
            "dead_letter",
            sender=sender,
            receiver=receiver,
            message=kind,
            reason=reason,
            count=count,
        )
