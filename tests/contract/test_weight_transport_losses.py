"""Every weight transport: engines that are killed or hang in the middle of a transfer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from tests.helpers.transport_fleet import (
    LAST,
    STREAMED,
    WHOLE,
    Fleet,
    every_transport,
    hang,
    kill,
    run,
    within,
)

from ratchet.errors import TransferFailed
from ratchet.transport.weights import receiver
from ratchet.transport.weights.base import LoadReport, SendReport
from ratchet.transport.weights.staging import Staging

if TYPE_CHECKING:
    import torch

pytestmark = every_transport


@pytest.mark.parametrize("at", [0, 5, LAST])
@pytest.mark.parametrize(
    ("place", "staging_mib"),
    [(0, None), (1, None), (2, None), pytest.param(1, WHOLE, id="1-staged")],
)
def test_an_engine_killed_in_the_middle_costs_the_others_nothing(
    transport: str,
    place: int,
    staging_mib: float | None,
    at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with Fleet(
            transport, 3, bucket_mib=STREAMED, staging_mib=staging_mib, timeout_s=60.0
        ) as fleet:
            sent_before, _ = await fleet.sync()
            assert isinstance(sent_before, SendReport)
            dead = list(fleet.sinks)[place]
            assert sent_before.num_buckets == LAST + 1
            kill(fleet.receivers[dead], monkeypatch, at)
            reads = Counter[str]()
            fleet.source.on_read = reads.update
            send, loads = fleet.start()
            with pytest.raises(RuntimeError, match="killed"):
                await loads[dead]
            fleet.sender.leave(dead, "its process is dead")
            async with within(10):
                sent, *rest = await asyncio.gather(
                    send, *(load for name, load in loads.items() if name != dead)
                )
            assert list(sent.lost) == [dead]
            assert "its process is dead" in sent.lost[dead]
            assert all(report.digest == sent.digest for report in rest)
            if transport == "broadcast" and at:
                assert reads["layers.0.weight"] == 1, "it goes on where it broke"
            for name, sink in fleet.sinks.items():
                assert sink.version == (fleet.version if name != dead else sink.version)
                assert not sink.paused
            assert fleet.sinks[dead].version in (1, None)
            await fleet.sync_well()

    run(main)


def test_an_engine_that_hangs_in_the_middle_fails_its_own_part(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody tells the trainer: it finds out in time for the others, and the lost one is told."""

    async def main() -> None:
        async with Fleet(transport, 3, bucket_mib=STREAMED, timeout_s=4.0) as fleet:
            await fleet.sync_well()
            _, stuck, _ = fleet.sinks
            go_on = hang(fleet.receivers[stuck], monkeypatch, 4)
            send, loads = fleet.start()
            async with within(4):
                sent = await send
            assert list(sent.lost) == [stuck]
            did = (
                "took no bucket for"
                if transport == "shared"
                else "did not come to the transfer within"
            )
            go_on.set()
            assert f"{did} 1 s" in sent.lost[stuck]
            async with within(1):
                _, late, _ = await asyncio.gather(*loads.values(), return_exceptions=True)
            assert isinstance(late, TransferFailed)
            assert "goes on without this engine" in str(late)
            for name, sink in fleet.sinks.items():
                assert sink.version == (None if name == stuck else fleet.version)
                assert not sink.paused
            await fleet.sync_well()

    run(main)


@pytest.mark.parametrize("method", ["pause", "write", "read"])
def test_an_engine_that_hangs_ends_by_the_deadline(
    transport: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "GRACE_S", 0.25)

    async def main() -> None:
        async with Fleet(transport, 2, timeout_s=1.5) as fleet:
            await fleet.sync_well()
            stuck, well = fleet.sinks.values()
            stuck.hold[method] = asyncio.Event()
            async with within(4):
                sent, (late, loaded) = await fleet.sync()
            assert isinstance(sent, SendReport)
            assert isinstance(loaded, LoadReport)
            assert isinstance(late, TransferFailed)
            assert str(late) == "version 2 was not loaded within 1.5 s"
            assert not stuck.paused
            assert stuck.version == (1 if method == "pause" else None)
            stuck.hold.clear()
            await fleet.sync_well()
            assert well.version == fleet.version

    run(main)


@pytest.mark.soak
def test_an_engine_that_takes_nothing_more_says_so(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 3, bucket_mib=STREAMED, timeout_s=4.0) as fleet:
            await fleet.sync_well()
            _, stuck, _ = fleet.sinks
            fleet.sinks[stuck].hold["write"] = asyncio.Event()
            async with within(6):
                sent, (_, late, _) = await fleet.sync()
            assert isinstance(sent, SendReport)
            assert list(sent.lost) == [stuck]
            did = "took no bucket for" if transport == "shared" else "did not take a bucket within"
            assert f"{did} 1 s" in sent.lost[stuck]
            assert isinstance(late, TransferFailed)
            for name, sink in fleet.sinks.items():
                assert sink.version == (None if name == stuck else fleet.version)
                assert not sink.paused
            fleet.sinks[stuck].hold.clear()
            await fleet.sync_well()

    run(main)


@pytest.mark.soak
def test_an_engine_that_hangs_for_a_moment_gets_its_version(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket is given up for it, and it comes back before it is; or it is waited for."""

    async def main() -> None:
        async with Fleet(transport, 2, bucket_mib=STREAMED, timeout_s=6.0) as fleet:
            await fleet.sync_well()
            name = next(iter(fleet.sinks))
            go_on = hang(fleet.receivers[name], monkeypatch, 4)
            send, loads = fleet.start()
            moment = 0.7 if transport == "shared" else 2.2  # there is one round only
            asyncio.get_running_loop().call_later(moment, go_on.set)
            sent, *_ = await asyncio.gather(send, *loads.values())
            assert sent.lost == {}
            assert {sink.version for sink in fleet.sinks.values()} == {fleet.version}
            await fleet.sync_well()

    run(main)


def test_staging_memory_is_two_buckets_at_either_end_after_a_break_too(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    buffers = Staging.buffers

    def counted(staging: Staging, sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        held = buffers(staging, sizes, device)
        assert len(held) == 2
        made.extend({buffer.data_ptr() for buffer in held} - set(made))
        return held

    async def main() -> None:
        async with Fleet(transport, 3, bucket_mib=STREAMED) as fleet:
            monkeypatch.setattr(Staging, "buffers", counted)
            await fleet.sync_well()
            dead = list(fleet.sinks)[1]
            kill(fleet.receivers[dead], monkeypatch, 4)
            send, loads = fleet.start()
            await asyncio.wait([loads[dead]])
            fleet.sender.leave(dead, "dead")
            await asyncio.gather(send, *loads.values(), return_exceptions=True)
            assert len(made) == 2 * (1 + 3)

    run(main)


def test_pairs_do_not_wait_for_one_that_hangs(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport != "p2p":
        pytest.skip("a group that broadcasts finds out by the deadline of a bucket")

    async def main() -> None:
        async with Fleet(transport, 3, bucket_mib=STREAMED, timeout_s=60.0) as fleet:
            await fleet.sync_well()
            stuck, *others = fleet.sinks
            go_on = hang(fleet.receivers[stuck], monkeypatch, 2)
            send, loads = fleet.start()
            async with within(10):  # of the 15 s until its bucket is given up
                await asyncio.gather(*(loads[name] for name in others))
            assert not send.done()
            go_on.set()
            sent, _ = await asyncio.gather(send, loads[stuck])
            assert sent.lost == {}, "slow, but not lost"
            assert {sink.version for sink in fleet.sinks.values()} == {fleet.version}

    run(main)
