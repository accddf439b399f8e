"""The rendezvous store of a run: rank 0 opens it, the others connect to it.

The launcher has chosen the port seconds before. If another program has taken it meanwhile, rank 0 takes a free one, and
the other ranks find it through the launcher (:class:`~deepspeed.exit_notes.ExitNotes`). On several machines, or without
a launcher of this package, the other ranks could not find it, so rank 0 raises.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as torch_dist

from deepspeed.comm.base.environment import Place
from deepspeed.errors import CommunicationError
from deepspeed.exit_notes import ExitNotes
from deepspeed.logging import logger
from deepspeed.ports import addresses_of, describe_listener, find_listener, free_port, is_here, why_not_reached

# If rank 0 runs on this machine and has the port open, it responds at once; a longer silence means another program.
_REPLY_SECONDS = 30.0
_RETRY_SECONDS = 0.1
# A retry at the same port may start while rank 0 of the previous attempt is still ending.
_RELEASE_SECONDS = 2.0
# The longest interval at which other ranks look for the reason of a failure.
_LAST_WORDS_SECONDS = 1.0
_IMPATIENT_SECONDS = 30.0
_OWN_ADDRESS = "127.0.0.1"
_served: list[torch_dist.TCPStore] = []  # the store, on rank 0


def open_store(url: str | None, place: Place, timeout: timedelta) -> Any:
    """Returns the rendezvous store at ``url``, or else at the address and port of ``place``.

    The environment must have ``place``; ``MASTER_PORT`` is set if rank 0 serves another port. ``timeout`` is for the
    process that serves the store, and then for each answer.

    Raises:
        CommunicationError: Another program listens there.
        RuntimeError: Nothing listens there (torch's message).
    """
    if url is not None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):  # torchrun's agent holds it
        arguments = (url or "env://", place.rank, place.world_size)
        store, _, _ = _patiently(
            lambda: next(torch_dist.rendezvous(*arguments, timeout=timeout)), lambda: _refuse(place, url)
        )
    elif place.rank == 0:
        store = _serve(place, timeout)
    else:
        store = _reach(place, timeout)
    store.set_timeout(timeout)
    return store


def _patiently(make: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Returns the result of ``make``; that of ``otherwise`` if a port is in use, and stays so for a while."""
    released_by = time.monotonic() + _RELEASE_SECONDS
    while True:
        try:
            return make()
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error):
                raise
        if time.monotonic() > released_by:
            return otherwise()
        time.sleep(_RETRY_SECONDS)


def _serve(place: Place, timeout: timedelta) -> torch_dist.TCPStore:
    """Opens the store as rank 0 and returns a connection to it."""
    assert place.address is not None and place.port is not None
    _served.clear()
    notes, wanted = ExitNotes.here(), place.port

    def elsewhere() -> torch_dist.TCPStore:
        if not notes.has_whole_run:
            _refuse(place, None)
        store = _tcp_store(place, _OWN_ADDRESS, True, timeout, port=0)
        logger.warning(
            f"port {wanted} was free when the launcher chose it, and is now held by {describe_listener(wanted)}. The "
            f"ranks meet at port {store.port} instead"
        )
        return store

    # Rank 0 listens at all addresses of its machine and does not reach itself by name: the name may be registered late,
    # or resolve to a machine that forwards connections.
    served = _patiently(lambda: _tcp_store(place, _OWN_ADDRESS, True, timeout), elsewhere)
    _served.append(served)
    notes.serves(wanted, served.port)
    os.environ["MASTER_PORT"] = str(served.port)
    if (doubt := _not_here(place.address)) is not None:
        logger.warning(
            f"rank 0 waits for the others at {place.address}:{served.port}, but {doubt}. They reach rank 0 only if "
            "that name leads to this machine for them; otherwise correct MASTER_ADDR"
        )
    # References to the process group that remain, such as in a traceback, keep a connection open, not the port.
    return _tcp_store(place, _OWN_ADDRESS, False, timeout, port=served.port)


def release_store() -> None:
    """Closes the rendezvous port if this process holds it, once the ranks have read why the run failed."""
    if _served:
        time.sleep(_LAST_WORDS_SECONDS)
        _served.clear()


def _tcp_store(
    place: Place, address: str, is_master: bool, timeout: timedelta, *, port: int | None = None
) -> torch_dist.TCPStore:
    """Returns a ``TCPStore`` that does not wait for ``world_size`` clients: processes of other runs would count."""
    assert place.port is not None
    return torch_dist.TCPStore(
        address,
        place.port if port is None else port,
        place.world_size,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )


def _reach(place: Place, timeout: timedelta) -> torch_dist.TCPStore:
    """Returns the store that rank 0 holds.

    Torch would resolve the name again, and might keep an address at which no process listens. So it gets the address
    at which the port is open. Torch would wait forever for a program that accepts the connection and sends nothing.
    """
    assert place.address is not None and place.port is not None
    deadline = time.monotonic() + timeout.total_seconds()
    address, port = _wait_for_listener(place.rank, place.address, place.port, timeout)
    os.environ["MASTER_PORT"] = str(port)
    left = max(deadline - time.monotonic(), 1.0)
    limit = min(left, _REPLY_SECONDS) if is_here(address) else left
    store = _within(limit, lambda: _tcp_store(place, address, False, timedelta(seconds=limit), port=port))
    if store is None:
        who = describe_listener(port) if is_here(address) else "another program"
        raise CommunicationError(
            f"rank {place.rank} of {place.world_size} (from {place.source}): {who} listens at "
            f"{place.address}:{port}, the rendezvous of the ranks, and does not answer as rank 0 would. "
            f"{_remedy(place)}"
        )
    return store


def _wait_for_listener(rank: int, name: str, wanted: int, timeout: timedelta) -> tuple[str, int]:
    """Waits until rank 0's machine accepts connections; returns its numeric address and the port.

    The name is resolved again in each attempt: a cluster's name server may know it only after the ranks have started.
    The port may be another one than was ``wanted``.

    Raises:
        RuntimeError: Nobody listens there within ``timeout``; the message has what the name resolves to on this
            machine.
    """
    started = time.monotonic()
    impatient_at = started + _IMPATIENT_SECONDS
    notes = ExitNotes.here()
    while True:
        port = notes.port_of(wanted)
        try:
            if port is None:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "rank 0 does not listen yet")
            return find_listener(name, port), port
        except OSError as error:
            now = time.monotonic()
            if now - started > timeout.total_seconds():
                raise RuntimeError(f"rank 0 was not reached within {timeout}: {why_not_reached(name, error)}") from None
            if now > impatient_at:
                impatient_at = math.inf  # logged once
                logger.warning(
                    f"rank {rank}: still waiting for rank 0 at {name}:{port or wanted}: {why_not_reached(name, error)}"
                )
        time.sleep(_RETRY_SECONDS)


def _within(seconds: float, make: Callable[[], torch_dist.TCPStore]) -> torch_dist.TCPStore | None:
    """Returns the result of ``make``; None if it fails, or does not end in time: torch cannot be interrupted."""
    made: list[torch_dist.TCPStore] = []

    def work() -> None:
        try:
            made.append(make())
        except RuntimeError:  # no store; the caller reports which processes are there
            return

    thread = threading.Thread(target=work, name="deepspeed-rendezvous", daemon=True)
    thread.start()
    thread.join(seconds + 1.0)
    return made[0] if made else None


def _not_here(name: str) -> str | None:
    """Returns a clause that says what ``name`` resolves to here; None if to an address of this machine."""
    if is_here(name):
        return None
    try:
        addresses = addresses_of(name)
    except OSError as unknown:
        return f"host {socket.gethostname()} cannot resolve that name ({unknown.strerror or unknown})"
    if any(is_here(address) for address in addresses):
        return None
    return f"host {socket.gethostname()} takes that name for {' or '.join(addresses)}, which it is not"


def _refuse(place: Place, url: str | None) -> NoReturn:
    """Raises: rank 0 cannot open the store."""
    where, occupant = url or f"{place.address}:{place.port}", "another program"
    if url is None and place.port is not None:
        occupant = describe_listener(place.port)
    raise CommunicationError(
        f"rank {place.rank} of {place.world_size} (from {place.source}) cannot open {where}, where the ranks were to "
        f"meet: the port is held by {occupant}. {_remedy(place)}"
    )


def _remedy(place: Place) -> str:
    """Returns the remedy that fits how the ranks were started."""
    port = free_port()
    if place.port is None:
        return f"Give init_method another port, such as {port}, on all ranks"
    if place.has_agent:
        return f"Give torchrun --master-port {port}"
    if place.source.startswith("torchrun"):  # its agent has chosen the port for this start of the ranks
        return "Start it again: torchrun then chooses another port, and with --max-restarts it does so by itself"
    if ExitNotes.here().has_launcher:
        return (
            "It was free when `deepspeed` looked. Start the same command again; if that program stays, add "
            f"--master_port {port}, the same on all machines"
        )
    return f"Set MASTER_PORT to a free port, such as {port}, on all ranks"
