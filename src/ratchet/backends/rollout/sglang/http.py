"""Calls of JSON over HTTP: of one server, with deadlines, repetitions and typed errors.

Consumes calls, produces the server's answers or a typed error. Waits for the server, up to a
deadline that every call has; a connection that breaks, an answer, or the deadline unblocks it.
Connections are kept alive and reused. A call is repeated only where that cannot do anything twice.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import aiohttp
import msgspec

from ratchet.errors import RatchetError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RETRIES: Final = 3
"""Of a call that is safe to repeat, within its deadline."""

Repeat: TypeAlias = Literal["unsent", "always"]

OK: Final = 200
_BACKOFF_S: Final = 0.1
_KEEPALIVE_S: Final = 2.0
"""Less than a server keeps an idle connection (5 s by default), so that it does not close one that
a request is just being written to."""
TEXT_LIMIT: Final = 500
"""Characters of an answer that go into an error."""
_LARGEST_BYTES: Final = 2**28
"""Of an answer; a token with its log probability takes some 40."""


class CallFailed(RatchetError):  # noqa: N818
    """A call of a server did not succeed."""


class ServerGone(CallFailed):
    """There is no connection, or it broke before the answer was whole.

    Args:
        text: what happened.
        sent: whether the server may have seen the request.
    """

    def __init__(self, text: str, *, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


class CallRefused(CallFailed):
    """The server answered, and not with success.

    Args:
        where: method and address.
        status: of HTTP.
        text: the server's reason, shortened.
    """

    def __init__(self, where: str, status: int, text: str) -> None:
        super().__init__(f"{where}: status {status}: {text}")
        self.status = status
        self.text = text


class TooLate(CallFailed):
    """There was no whole answer within the deadline."""


class HttpClient:
    """Calls of one server. Made anywhere, used on one event loop, closed there."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        control_timeout_s: float = 60.0,
    ) -> None:
        """Connect on the first call.

        Args:
            url: "http://host:port", without a slash at its end.
            api_key: for generation and what is read.
            admin_key: for control; the api key if there is none.
            control_timeout_s: deadline of every call but `generate`, unless it is given another.
        """
        self.url = url
        self._api_key = api_key
        self._admin_key = admin_key or api_key
        self._control_timeout_s = control_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        """Close the connections; calls in flight end with `ServerGone`. Idempotent."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        admin: bool = False,
        timeout_s: float | None = None,
        repeat: Repeat = "unsent",
        decode: Callable[[bytes], Any] | None = None,
    ) -> Any:
        """Make one call and return the decoded JSON, or the text of an answer that is none.

        Args:
            method: of HTTP.
            path: with a slash.
            body: sent as JSON.
            admin: use the key of control.
            timeout_s: deadline of everything, repetitions included.
            repeat: "unsent" repeats only what the server cannot have seen, "always" also what it
                may have: for calls that do no more when made twice.
            decode: of an answer that has to be JSON.

        Raises:
            ServerGone, CallRefused, TooLate.
        """
        deadline_s = self._control_timeout_s if timeout_s is None else timeout_s
        where = f"{method} {self.url}{path}"
        data = None if body is None else msgspec.json.encode(body)
        key = self._admin_key if admin else self._api_key
        headers = {"Content-Type": "application/json"} if data is not None else {}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        try:
            async with asyncio.timeout(deadline_s):
                for attempt in range(RETRIES + 1):
                    try:
                        text, is_json = await self._once(method, path, where, data, headers)
                        break
                    except ServerGone as error:
                        again = repeat == "always" or not error.sent
                        if self._closed or not again or attempt == RETRIES:
                            raise
                    await asyncio.sleep(_BACKOFF_S * 2**attempt)
        except TimeoutError:
            msg = f"{where}: no answer within {deadline_s:g} s"
            raise TooLate(msg) from None
        try:
            if decode is None and not is_json:
                return text.decode(errors="replace")
            return (decode or msgspec.json.decode)(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            msg = f"not the answer that was expected: {error}"
            raise CallRefused(where, OK, msg) from error

    async def _once(
        self,
        method: str,
        path: str,
        where: str,
        data: bytes | None,
        headers: Mapping[str, str],
    ) -> tuple[bytes, bool]:
        """Return the body of a success, and whether it is JSON."""
        try:
            async with self._open().request(
                method, f"{self.url}{path}", data=data, headers=headers, allow_redirects=False
            ) as response:
                text = await _body(response, where)
        except aiohttp.ClientConnectorError as error:
            msg = f"{where}: {error}"
            raise ServerGone(msg, sent=False) from error
        except (aiohttp.ClientError, OSError) as error:
            msg = f"{where}: {type(error).__name__}: {error}"
            raise ServerGone(msg, sent=True) from error
        if response.status != OK:
            raise CallRefused(where, response.status, text.decode(errors="replace")[:TEXT_LIMIT])
        return text, response.content_type == "application/json"

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            msg = f"{self.url}: the client was closed"
            raise ServerGone(msg, sent=False)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None),  # `call` has the deadline
                trust_env=False,  # a proxy of the environment is not between us and our servers
            )
        return self._session


async def _body(response: aiohttp.ClientResponse, where: str) -> bytes:
    """Return the body, if it is no larger than any that a server has to send."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > _LARGEST_BYTES:
            msg = f"the answer is longer than {_LARGEST_BYTES} bytes"
            raise CallRefused(where, response.status, msg)
    return b"".join(pieces)
