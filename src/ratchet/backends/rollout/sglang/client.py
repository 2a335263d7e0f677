"""The endpoints of one SGLang server, or of a router in front of several.

Consumes calls, produces the server's answers. Each call waits for its answer, up to a deadline, and
raises a `CallFailed`: `ServerGone`, `CallRefused` or `TooLate`. `http.py` has the connections, and
says what is repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from ratchet.backends.rollout.sglang.http import (
    OK,
    TEXT_LIMIT,
    CallFailed,
    CallRefused,
    HttpClient,
    Repeat,
    ServerGone,
    TooLate,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ratchet.types import PauseMode

__all__ = ["CallFailed", "CallRefused", "SGLangClient", "ServerGone", "TooLate"]

_UNAVAILABLE: Final = 503


class SGLangClient(HttpClient):
    """Calls by the name of what they do. Made anywhere, used on one event loop, closed there."""

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
        """Return whether it generates, which an idle server tries; paused, starting and ill are all
        False.

        Raises:
            ServerGone, TooLate: if it does not answer at all.
        """
        return await self._available("/health", timeout_s)

    async def ready(self, *, timeout_s: float | None = None) -> bool:
        """Return whether it takes itself for healthy, without a try."""
        return await self._available("/ready", timeout_s)

    async def _available(self, path: str, timeout_s: float | None) -> bool:
        try:
            await self.call("GET", path, timeout_s=timeout_s, repeat="always")
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

    # --- any control

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
            raise CallRefused(f"POST {self.url}{path}", OK, text[:TEXT_LIMIT])
        return answer
