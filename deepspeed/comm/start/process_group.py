"""The process group: starting it, adopting an existing one, and queries about ranks.

``deepspeed.comm`` uses torch's global process group, regardless of which code started it. So a program may mix calls of
both libraries and destroy the group with either.

Gloo listens at the address of the machine's host name. Many installers write that name into ``/etc/hosts`` as
``127.0.1.1``: ranks on other machines are then sent to themselves. On such a machine :func:`choose_interface` lets gloo
use the interface of the route to another machine of the run.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import time
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as torch_dist

from deepspeed.comm.base.device import default_backend, local_device, serves_host_only, start_world_group, unbound
from deepspeed.comm.base.environment import Place, find_place, local_rank_of
from deepspeed.comm.base.probes import probed_connections
from deepspeed.comm.base.timeout import default_timeout
from deepspeed.comm.job import job
from deepspeed.comm.job.job import Job
from deepspeed.comm.members.join import JOIN, join_run
from deepspeed.comm.start.admission import JoiningProcess, StoreLostError, receive_ranks
from deepspeed.comm.start.mpi import find_first_host
from deepspeed.comm.start.rendezvous import open_store, release_store
from deepspeed.comm.start.startup import RankInfo, agree_on_config, agree_on_model, own_facts, rank_map
from deepspeed.comm.start.supervised_start import start_supervised
from deepspeed.comm.watch.barrier import SupervisedStore
from deepspeed.errors import CallOrderError, CommunicationError
from deepspeed.logging import log_dist
from deepspeed.ports import DEFAULT_PORT, address_towards, first_address

NCCL_BACKEND = "nccl"
GLOO_BACKEND = "gloo"
MPI_BACKEND = "mpi"
CCL_BACKEND = "ccl"
HCCL_BACKEND = "hccl"
SCCL_BACKEND = "sccl"


_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_OTHER_HOST_KEY = "deepspeed/other_host"


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Starts torch's global process group, or adopts the existing one. Every rank must call it.

    If an earlier call started that group and a rank has failed since, it destroys the group and starts a new one, so
    that a program can retry in the same process.

    Rank and world size are read from the environment (:mod:`deepspeed.comm.base.environment` lists the ways) and
    written back as ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. One log line on rank
    0 states the source. A single process needs no rendezvous, so it opens no port.

    Where the backend serves the accelerator, the current device is set before the group is started: the one
    that the program has chosen, else the one of its local rank (``comm.start.device.local_device``).

    Args:
        dist_backend: ``"nccl"``, ``"gloo"``, ...; None: the accelerator's.
        auto_mpi_discovery: Whether to read variables of MPI, Slurm and clusters.
        distributed_port: Port where rank 0 listens if ``MASTER_PORT`` is not set.
        verbose: Whether to log that line.
        timeout: Limit for each collective; None: :func:`default_timeout`.
        init_method: A torch rendezvous URL (``tcp://host:port``, ``file:///path``); None: ``MASTER_ADDR`` and
            ``MASTER_PORT``.
        dist_init_required: False: the group must exist already. None or True: it is started if there is none.
        config: The configuration (dict, path or parsed): its ``comms_logger`` section switches the communication log.
        rank: Global rank; -1: from the environment.
        world_size: Number of processes; -1: from the environment.

    Raises:
        CommunicationError: Rank and world size cannot be found, there is no device with that number, torch was built
            without the backend, or other ranks did not arrive within ``timeout``.
        CallOrderError: ``dist_init_required=False`` and there is no group.
    """
    if config is not None:
        from deepspeed.comm.summary import configure

        configure(deepspeed_config=config)
    if torch_dist.is_initialized() and not _ends_failed_run():
        _adopt(verbose)
        return
    if os.environ.get(JOIN):
        join_run(os.environ[JOIN])
        return
    if dist_init_required is False:
        raise CallOrderError(
            "dist_init_required=False requires that the process group exists, but there is none. Call "
            "torch.distributed.init_process_group first, or leave dist_init_required at None"
        )
    place = find_place(
        os.environ,
        rank=rank,
        world_size=world_size,
        init_method=init_method,
        default_port=distributed_port,
        discover=auto_mpi_discovery,
        device_count=torch.accelerator.device_count(),
        mpi_address=lambda: find_first_host(os.environ),
    )
    place.export(os.environ)
    if dist_backend:
        _check_backend(dist_backend)
    backend = dist_backend or default_backend()
    device = None if serves_host_only(backend) else local_device()
    with probed_connections():
        facts = _start(backend, place, init_method, timeout or default_timeout(), device)
    # Opened now, so that other ranks notice if this program ends without communicating again.
    Job.open().watched.watch.may_restart = True
    if verbose:
        log_dist(f"process group started: {place.world_size} rank(s), backend {backend}, found by {place.source}")
        for line in rank_map(facts) if facts else ():
            log_dist(line)


def _check_backend(backend: str) -> None:
    """Raises if torch was built without the backend that the program names (``"gloo"``, ``"cpu:gloo,cuda:nccl"``)."""
    missing = [name for part in backend.split(",") if not torch_dist.is_backend_available(name := part.split(":")[-1])]
    if missing:
        raise CommunicationError(
            f"init_distributed(dist_backend={backend!r}): expected backends that this torch has, found {missing[0]!r}, "
            f"which it was built without; leave dist_backend out, which stands for {default_backend()!r} here"
        )


def _ends_failed_run() -> bool:
    """Destroys the process group if :func:`init_distributed` has started it and a wait in it has failed.

    Returns:
        Whether it destroyed the group.
    """
    watched = Job.adopt().watched
    if not (watched.has_failed and watched.watch.may_restart):
        return False
    log_dist("the process group of this process belongs to a run that has failed; starting a new one", ranks=[-1])
    destroy_process_group()
    return True


def _adopt(verbose: bool) -> None:
    """Sets the environment variables that are missing if the program started the group, and chooses the device."""
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    local_rank = local_rank_of(os.environ, rank, size, torch.accelerator.device_count())
    Place(rank, size, local_rank, None, None, "adopted").export(os.environ)
    if not serves_host_only(torch_dist.get_backend()):
        local_device()
    Job.adopt().watched.begin()  # as for a group of our own
    if verbose:
        log_dist(f"process group adopted: {size} rank(s), backend {torch_dist.get_backend()}, started by the caller")


def _start(
    backend: str, place: Place, init_method: str | None, timeout: timedelta, device: torch.device | None
) -> list[RankInfo]:
    """Starts the group once all ranks have arrived and match; returns the facts of all ranks, on rank 0."""
    arguments: dict[str, Any] = {"rank": place.rank, "world_size": place.world_size, "timeout": timeout}
    url = init_method if init_method is not None and not init_method.startswith("env:") else None
    where = url or (f"{place.address}:{place.port}" if place.world_size > 1 else "this process")
    facts: list[RankInfo] = []
    neighbors: dict[int, str] = {}
    started = time.monotonic()
    try:
        if url is None and place.world_size == 1:
            arguments["store"] = torch_dist.HashStore()
        else:
            store, prefix = None, "default_pg"
            while store is None:
                store = open_store(url, place, timeout)
                if url is None:  # rank 0 may have found the port taken
                    place = replace(place, port=int(os.environ["MASTER_PORT"]))
                    where = f"{place.address}:{place.port}"
                try:
                    if place.world_size > 1:
                        # The address that was reached: the name may resolve to several, and was perhaps unknown before.
                        reached = getattr(store, "host", None) or place.address
                        process = JoiningProcess.here(place, own_facts(place.local_rank, backend, reached))
                        prefix, facts, neighbors = receive_ranks(store, process, where, timeout)
                except StoreLostError:
                    if time.monotonic() - started > timeout.total_seconds():
                        raise
                    store = None
            arguments["store"] = torch_dist.PrefixStore(prefix, store)

        def start() -> None:
            if place.world_size > 1:
                choose_interface(os.environ, arguments["store"], place, facts)
            start_world_group(backend, device, **arguments)

        if place.world_size > 1 and device is None:
            start_supervised(start, arguments["store"], neighbors)
        else:  # the current device is one of this thread
            start()
    except CommunicationError:  # raised by this package, with a complete message
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise CommunicationError(
            f"rank {place.rank} of {place.world_size} (from {place.source}) could not start the process group with "
            f"backend {backend!r} at {where}; it gave up after {time.monotonic() - started:.0f} s: {error}. Check that "
            f"all {place.world_size} processes were started and can reach that address"
        ) from error
    return facts


def check_same_config(config: Mapping[str, Any] | Exception, group: Any = None) -> None:
    """Compares the configuration of all ranks of ``group`` (None: all). All of them must call it.

    ``config`` is the value per dotted key; or why this rank could not read its configuration.

    Raises:
        DeepSpeedConfigError: A rank has another configuration, or could not read its own; the same on every rank.
    """
    place = _comparing(group, "the comparison of the configurations of all ranks (deepspeed.initialize)")
    if place is not None:
        agree_on_config(*place, config, default_timeout())
    elif isinstance(config, Exception):
        raise config


def check_same_model(description: Sequence[str], group: Any = None) -> None:
    """Compares the models of all ranks of ``group`` (None: all). All of them must call it.

    ``description`` is a line for everything that must be the same, beginning with its name and a colon.

    Raises:
        DivergenceError: A rank has another model; the same on every rank.
    """
    place = _comparing(group, "the comparison of the models of all ranks (deepspeed.initialize)")
    if place is not None:
        agree_on_model(*place, description, default_timeout())


def _comparing(group: Any, label: str) -> tuple[Any, str, int, int] | None:
    """Returns store, topic, rank and number of ranks for a comparison; None if there is no other rank."""
    # Simulated ranks have no processes to compare.
    watched = Job.current().watched.of(group) if torch_dist.is_initialized() else None
    if watched is None:
        return None
    members = "-".join(map(str, watched.ranks))
    store = SupervisedStore(watched.watch, label, watched.ranks)
    return store, f"{zlib.crc32(members.encode()):08x}", torch_dist.get_rank(group), len(watched.ranks)


def mpi_discovery(distributed_port: int = DEFAULT_PORT, verbose: bool = True) -> None:
    """Fills RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of MPI or Slurm.

    Raises:
        CommunicationError: The host of rank 0 cannot be found; set MASTER_ADDR.
    """
    place = find_place(
        os.environ,
        default_port=distributed_port,
        device_count=torch.accelerator.device_count(),
        mpi_address=lambda: find_first_host(os.environ),
    )
    place.export(os.environ)
    if verbose:
        log_dist(
            f"rank {place.rank} of {place.world_size}, local rank {place.local_rank}, rendezvous at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, found by {place.source}"
        )


def is_available() -> bool:
    """Returns whether torch was built with distributed support."""
    return torch_dist.is_available()


def is_initialized() -> bool:
    """Returns whether the process group exists, regardless of which code started it."""
    return job.is_initialized()


def destroy_process_group(group: Any = None) -> None:
    """Destroys ``group``, or all groups. After a failed start or wait this also frees the port of the rendezvous.

    Without ``group`` and without a process group, there is nothing to destroy: the start has failed, or this is the
    second call. So a ``finally`` clause may call it.
    """
    if group is None and not torch_dist.is_initialized():
        release_store()
        return
    is_all = group is None or group is torch_dist.group.WORLD
    job = Job.adopt()
    torch_dist.destroy_process_group(group)
    if is_all and job.watched.has_failed:
        job.close()
        release_store()


def new_group(ranks: list[int] | None = None, **options: Any) -> Any:
    """Makes a group of some of the (global) ranks. All ranks must call it, members or not, in the same order.

    ``options`` are further arguments of :func:`torch.distributed.new_group` (``timeout``, ``backend``, ...). With
    ``use_local_synchronization`` only the members call it.

    Raises:
        DivergenceError: A rank makes another call.
        CommunicationError: Some rank has ended or did not arrive.
    """
    among = ranks if options.get("use_local_synchronization") else None
    if among is None or get_rank() in among:
        Job.adopt().process_groups.barrier(f"new_group({ranks})", options.get("timeout"), among)
    with unbound(), probed_connections():
        return torch_dist.new_group(ranks, **options)


def get_rank(group: Any = None) -> int:
    """Returns this process's rank in ``group`` (None: among all); -1 if it is no member."""
    return job.rank_in(group)


def get_world_size(group: Any = None) -> int:
    """Returns the number of ranks in ``group`` (None: of all); -1 if this process is no member."""
    return job.size_of(group)


def get_local_rank() -> int:
    """Returns this process's rank among those of its host: ``LOCAL_RANK``.

    Raises:
        CallOrderError: The variable is not set; :func:`init_distributed` sets it.
    """
    text = os.environ.get("LOCAL_RANK")
    if text is None:
        raise CallOrderError(
            "LOCAL_RANK is not set; call deepspeed.init_distributed() before asking for the local rank"
        )
    return int(text)


def get_world_group() -> Any:
    """Returns the group of all ranks."""
    return torch_dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Returns the global rank of member number ``group_rank`` of ``group`` (None: the same number)."""
    return group_rank if group is None else torch_dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Returns the global ranks of the members of ``group`` (None: of all), in order."""
    return list(torch_dist.get_process_group_ranks(group))


def get_backend(group: Any = None) -> str:
    """Returns the backend of ``group``."""
    return job.backend_of(group)


def has_all_gather_into_tensor() -> bool:
    """Returns True: every supported torch gathers into one flat tensor."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Returns True: every supported torch reduces and scatters one flat tensor."""
    return True


def has_coalescing_manager() -> bool:
    """Returns whether torch can group collectives into one launch."""
    return hasattr(torch_dist.distributed_c10d, "_coalescing_manager")


def has_all_reduce_coalesced() -> bool:
    """Returns whether torch has a coalesced all-reduce."""
    return hasattr(torch_dist, "all_reduce_coalesced")


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """Returns a torch :class:`~torch.distributed.device_mesh.DeviceMesh` over all ranks. All ranks must call it.

    The product of ``mesh_shape`` must be the number of ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from deepspeed.accelerator import get_accelerator

    Job.adopt().process_groups.barrier(f"initialize_mesh_device({mesh_shape}, {mesh_dim_names})", None)
    return init_device_mesh(get_accelerator().device_name(), mesh_shape, mesh_dim_names=mesh_dim_names)


def choose_interface(environ: MutableMapping[str, str], store: Any, place: Place, facts: Sequence[RankInfo]) -> None:
    """Sets ``GLOO_SOCKET_IFNAME`` if gloo would listen where no other machine reaches it. Every rank must call it.

    Gloo does not connect IPv4 with IPv6: if the machines' names resolve to addresses of both families, every machine
    sets the interface. Otherwise nothing is set on a machine whose name resolves to an address of the network.
    Nothing is set in a job on one machine, or where the variable is already set. ``facts`` are those of all ranks, on
    rank 0; the others find in the store what they need.
    """
    if place.rank == 0:
        here = facts[0].host
        other = next((fact.address for fact in facts if fact.host != here and fact.address), "")
        versions = {ipaddress.ip_address(fact.named_address).version for fact in facts if fact.named_address}
        store.set(_OTHER_HOST_KEY, json.dumps([other, len(versions) > 1]))
    other, are_mixed = json.loads(store.get(_OTHER_HOST_KEY))
    if not other or environ.get(_INTERFACE_VARIABLE) or not (are_mixed or means_loopback(socket.gethostname())):
        return
    mine = address_towards(other)  # ``other`` itself if it is an address of this machine
    name = interface_of(mine) if mine is not None else None
    if name is None:
        log_dist(
            f"gloo cannot listen at the address of the host name {socket.gethostname()}: the address belongs to the "
            "loopback interface, or other machines use another family (IPv4 or IPv6). The routes to the other machines "
            f"do not show which interface to use. Set {_INTERFACE_VARIABLE} to the name of the network interface",
            ranks=[-1],
            level=logging.WARNING,
        )
        return
    environ[_INTERFACE_VARIABLE] = name


def means_loopback(name: str) -> bool:
    """Returns whether a host name is unknown here or resolves to a loopback address first: gloo takes the first."""
    first = first_address(name)
    return first is None or ipaddress.ip_address(first).is_loopback


def interface_of(address: str) -> str | None:
    """Returns the network interface of this machine that has ``address``; None if none has, or it is the loopback."""
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in entries):
            return name
    return None
