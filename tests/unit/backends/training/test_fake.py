import asyncio
import subprocess
import sys

import pytest
from tests.helpers.training import make_groups

from ratchet.backends.training.fake import NAME, FakeBackend


def test_scripted_trouble() -> None:
    async def main() -> None:
        backend = FakeBackend(bad_gradients={2}, bad_steps={3})
        await backend.start()
        finite, applied = [], []
        for _ in range(4):
            finite.append((await backend.forward_backward(make_groups(1))).finite)
            before = backend.weights
            applied.append((await backend.optimizer_step()).applied)
            assert (backend.weights == before).all() == (not applied[-1])
        assert finite == [True, False, True, True]
        assert applied == [True, False, False, True]
        assert backend.weights[0] == 2.0

    asyncio.run(main())


def test_the_weights_follow_the_rewards() -> None:
    async def main() -> None:
        backend = FakeBackend()
        await backend.start()
        groups = make_groups(2)
        rewards = [reward for group in groups for reward in group.rewards]
        before = backend.weights
        await backend.forward_backward(groups)
        await backend.optimizer_step()
        assert backend.weights[1] - before[1] == pytest.approx(sum(rewards) / len(rewards))
        (w,) = backend.read([NAME])
        assert w.tolist() == backend.weights.tolist()

    asyncio.run(main())


def test_time_is_the_event_loops() -> None:
    async def main() -> None:
        backend = FakeBackend(forward_backward_s=0.02, optimizer_s=0.01)
        await backend.start()
        loop = asyncio.get_running_loop()
        started = loop.time()
        await backend.forward_backward(make_groups(1))
        assert loop.time() - started >= 0.02
        started = loop.time()
        await backend.optimizer_step()
        assert loop.time() - started >= 0.01

    asyncio.run(main())


def test_no_torch_until_weights_are_read() -> None:
    code = (
        "import sys, asyncio\n"
        "from ratchet.backends.training.fake import FakeBackend\n"
        "b = FakeBackend()\n"
        "asyncio.run(b.start()); b.specs(); b.weights\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
