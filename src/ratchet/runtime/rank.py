"""One rank of a trainer as a process: `python -m ratchet.runtime.rank`, started by torch's elastic
agent in `ratchet.runtime.ranks`.

Consumes its number from the agent's environment, and its `RoleSpec` from the private directory of
the gang. Rank 0 is the role: it hosts the TrainerActor, with a training backend that leads. The
others follow it. Produces a log, trainer-0.jsonl for rank 0 and trainer-0.rankN.jsonl for rank N,
and last words for the agent.

Waits for the other ranks at the start, at most `channel.COLLECTIVE_S`, which also limits every
collective of the model. The agent's death ends the process at once. SIGTERM: rank 0 stops as a role
does; the others go on until rank 0 closes its backend, or leave after `role.STOP_S`, even if they
are stuck in a collective.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import os
import signal
import socket
import struct
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Final

import msgspec

from ratchet.errors import ConfigError, RunFailed
from ratchet.imports import import_chosen
from ratchet.observability.logs import configure_logging, route_library_logs
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.compose import TRAINERS
from ratchet.runtime.gang import FOLDER, RankFiles
from ratchet.runtime.placement import RankSpec, RoleSpec
from ratchet.runtime.role import (
    STOP_S,
    RoleOutcome,
    freeze_imports,
    leave,
    log_name,
    outcome_of_work,
    run_role,
)
from ratchet.transport.mailbox.address import Address

_SIOCGIFADDR: Final = 0x8915


def join(spec: RoleSpec, ranks: RankSpec, rank: int, folder: Path) -> None:
    """Enter the default process group: NCCL where this machine has GPUs, else gloo.

    Raises:
        ConfigError: if there are fewer GPUs than ranks, or no interface has the node's address.
    """
    import torch
    import torch.distributed as dist

    from ratchet.backends.training.channel import COLLECTIVE_S
    from ratchet.runtime.rendezvous import rank_store

    num_devices = torch.cuda.device_count()
    if 0 < num_devices < ranks.ranks_per_node:
        msg = (
            f"trainer.ranks_per_node = {ranks.ranks_per_node}, but this machine has {num_devices}"
            f" GPUs, and each rank needs one of its own: set it to {num_devices} at most"
        )
        raise ConfigError(msg)
    interface = interface_of(_host(spec, ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if num_devices:
        torch.cuda.set_device(rank % num_devices)
    dist.init_process_group(
        "nccl" if num_devices else "gloo",
        store=rank_store(ranks, spec.run_id, folder),
        rank=rank,
        world_size=ranks.num_nodes * ranks.ranks_per_node,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )


def _host(spec: RoleSpec, ranks: RankSpec) -> str:
    """Return this node's address towards the other ranks."""
    address = Address.parse(spec.listen)
    return "127.0.0.1" if ranks.num_nodes == 1 or address.kind == "unix" else address.host


def interface_of(host: str) -> str:
    """Return the network interface with this address; gloo and NCCL are told interfaces.

    Raises:
        ConfigError: if there is none.
    """
    family, _, _, _, (text, *_) = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    address = ipaddress.ip_address(text)
    if address.is_loopback:
        return "lo"
    for _, name in socket.if_nameindex():
        if address == (_ipv4(name) if family == socket.AF_INET else _ipv6().get(name)):
            return name
    msg = f"runtime.host = {host!r} is not the address of a network interface of this machine"
    raise ConfigError(msg)


def _ipv4(interface: str) -> ipaddress.IPv4Address | None:
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has none
            return None
    return ipaddress.IPv4Address(answer[20:24])


def _ipv6() -> dict[str, ipaddress.IPv6Address]:
    lines = Path("/proc/net/if_inet6").read_text().splitlines()
    fields = [line.split() for line in lines]
    return {each[5]: ipaddress.IPv6Address(bytes.fromhex(each[0])) for each in fields}


def run_follower(spec: RoleSpec, rank: int) -> RoleOutcome:
    """Follow rank 0 to its end."""
    from ratchet.backends.training.ranks import follow
    from ratchet.runtime.base_model import ensure_base_model

    run = RunDirectory(Path(spec.run_dir))
    config = spec.load_config() if spec.config else run.load_config()
    name = f"{log_name(spec.role)}.rank{rank}"
    log = configure_logging(
        run.logs / f"{name}.jsonl", role=name, run=spec.run_id, level=spec.level
    )
    create = import_chosen("trainer.backend", config.trainer.backend, TRAINERS)
    backend = create(config, ensure_base_model(config, run.base))
    route_library_logs()
    freeze_imports()
    log.info("rank_started", rank=rank)
    try:
        follow(backend)
        outcome = RoleOutcome("finished")
    except RunFailed as error:
        outcome = RoleOutcome("failed", f"{type(error).__name__}: {error}")
    log.info("rank_ended", status=outcome.status, detail=outcome.detail)
    return outcome


def _leave_on_sigterm() -> None:
    """End a follower some time after SIGTERM, from a thread: its main thread may be stuck."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        time.sleep(STOP_S)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="sigterm").start()


def _run(spec: RoleSpec, rank: int, folder: Path) -> RoleOutcome:
    from ratchet.runtime.base_model import ensure_base_model

    # before there are ranks: transformers writes a model on rank 0 alone
    run = RunDirectory(Path(spec.run_dir))
    ensure_base_model(spec.load_config() if spec.config else run.load_config(), run.base)
    join(spec, spec.ranks or RankSpec(1), rank, folder)
    if rank:
        return run_follower(spec, rank)
    return asyncio.run(run_role(spec))


def main() -> None:
    """Take part as the rank that the environment says, leave last words, and go."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = int(os.environ["RANK"])
    if rank:
        _leave_on_sigterm()
    files = RankFiles(Path(os.environ[FOLDER]), int(os.environ["LOCAL_RANK"]))
    try:
        files.become_stdin()
    except FileNotFoundError:
        os._exit(1)  # the agent is gone
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(1)
    spec = msgspec.json.decode(line, type=RoleSpec)
    outcome = outcome_of_work(lambda: _run(spec, rank, files.folder))
    files.say(outcome)
    leave(outcome)


if __name__ == "__main__":
    main()
