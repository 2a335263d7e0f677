"""One SGLang server over HTTP.

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
    from collections.abc import Callable, Mapping, Sequence

    from ratchet.types import PauseMode

RETRIES: Final = 3
"""Of a call that is safe to repeat, within its deadline."""

Repeat: TypeAlias = Literal["unsent", "always"]

_OK: Final = 200
_UNAVAILABLE: Final = 503
_BACKOFF_S: Final = 0.1
_KEEPALIVE_S: Final = 2.0
"""Less than a server keeps an idle connection (5 s by default), so that it does not close one that
a request is just being written to."""
_TEXT_LIMIT: Final = 500
"""Characters of an answer that go into an error."""


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


class SGLangClient:
    """Calls of one server, or of a router. Made anywhere, used on one event loop, closed there."""

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

    # --- generation

    async def generate(
        self,
        body: Mapping[str, Any],
        *,
        timeout_s: float,
        decode: Callable[[bytes], Any] = msgspec.json.decode,
    ) -> Any:
        """Generate; a list of prompts gives a list of answers. Repeated only while nothing was
        sent.

        Raises:
            ServerGone, CallRefused, TooLate.
        """
        return await self.call("POST", "/generate", body, timeout_s=timeout_s, decode=decode)

    async def abort(self, rid: str, *, timeout_s: float | None = None) -> None:
        """Take one request out of the batch; an unknown one is ignored."""
        body = {"rid": rid, "abort_all": False}
        await self.control("/abort_request", body, timeout_s=timeout_s, repeat="always")

    # --- control

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two tokens; new requests wait. Idempotent."""
        await self.control("/pause_generation", {"mode": mode}, repeat="always")

    async def resume(self) -> None:
        """Go on. Idempotent."""
        await self.control("/continue_generation", {}, repeat="always")

    async def flush_cache(self) -> None:
        """Empty the prefix cache.

        Raises:
            CallRefused: if requests hold parts of it.
        """
        await self.control("/flush_cache", {}, repeat="always")

    async def init_group(
        self,
        *,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        name: str,
        backend: str,
        timeout_s: float | None = None,
    ) -> None:
        """Join a process group; returns when all of it has met."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self.control("/init_weights_update_group", body, timeout_s=timeout_s)

    async def destroy_group(self, name: str) -> None:
        """Leave a process group; unknown to the server is `CallRefused`."""
        await self.control("/destroy_weights_update_group", {"group_name": name})

    async def begin_update(self) -> None:
        """Open an update session; while there is one it is `CallRefused`."""
        await self.control("/begin_weight_update", {})

    async def end_update(self) -> None:
        """Close the update session; without one it is `CallRefused`."""
        await self.control("/end_weight_update", {})

    async def update_from_group(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        weight_version: str | None = None,
        load_format: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Receive tensors from rank 0 of a group; never flushes. Unknown names are ignored."""
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        if weight_version is not None:
            body["weight_version"] = weight_version
        if load_format is not None:
            body["load_format"] = load_format
        await self.control("/update_weights_from_distributed", body, timeout_s=timeout_s)

    async def set_version(self, version: str) -> None:
        """Name the weights that the server holds; running requests go on."""
        body = {"new_version": version, "abort_all_requests": False}
        await self.control("/update_weight_version", body, repeat="always")

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a directory that the server can read."""
        await self.control("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter."""
        await self.control("/unload_lora_adapter", {"lora_name": name})

    # --- what it is

    async def healthy(self, *, timeout_s: float | None = None) -> bool:
        """Return whether it serves; paused, starting and ill are all False.

        Raises:
            ServerGone, TooLate: if it does not answer at all.
        """
        try:
            await self.call("GET", "/health", timeout_s=timeout_s, repeat="always")
        except CallRefused as error:
            if error.status == _UNAVAILABLE:
                return False
            raise
        return True

    async def model_info(self, *, timeout_s: float | None = None) -> Any:
        """Return what the server says of its model, `weight_version` among others."""
        return await self.call("GET", "/model_info", timeout_s=timeout_s, repeat="always")

    async def server_info(self) -> Any:
        """Return the server's arguments and `version`, that of SGLang."""
        return await self.call("GET", "/server_info", repeat="always")

    # --- any call

    async def control(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        repeat: Repeat = "unsent",
    ) -> Any:
        """POST with the admin key; an answer that says `success: false` is refused as well."""
        answer = await self.call("POST", path, body, admin=True, timeout_s=timeout_s, repeat=repeat)
        if isinstance(answer, dict) and answer.get("success") is False:
            text = str(answer.get("message") or answer.get("error_message") or answer)
            raise CallRefused(f"POST {self.url}{path}", _OK, text[:_TEXT_LIMIT])
        return answer

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        admin: bool = False,
        timeout_s: float | None = None,
        repeat: Repeat = "unsent",
        decode: Callable[[bytes], Any] = msgspec.json.decode,
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
            decode: of an answer in JSON.

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
            return decode(text) if is_json else text.decode(errors="replace")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            msg = f"not the answer that was expected: {error}"
            raise CallRefused(where, _OK, msg) from error

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
                text = await response.read()
        except aiohttp.ClientConnectorError as error:
            msg = f"{where}: {error}"
            raise ServerGone(msg, sent=False) from error
        except (aiohttp.ClientError, OSError) as error:
            msg = f"{where}: {type(error).__name__}: {error}"
            raise ServerGone(msg, sent=True) from error
        if response.status != _OK:
            raise CallRefused(where, response.status, text.decode(errors="replace")[:_TEXT_LIMIT])
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
