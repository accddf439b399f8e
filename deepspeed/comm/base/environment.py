"""Reads this process's rank and the rendezvous address from the environment.

Each launcher of distributed jobs sets its own variables. :func:`find_place` reads them in this order and returns which
it used:

1. ``RANK`` and ``WORLD_SIZE`` (the ``deepspeed`` command, torchrun, Accelerate, Lightning),
2. Open MPI's ``OMPI_COMM_WORLD_*``, MVAPICH's ``MV2_COMM_WORLD_*``,
3. Slurm's ``SLURM_PROCID`` and ``SLURM_NTASKS`` (a task started by ``srun``),
4. ``PMI_RANK`` and ``PMI_SIZE`` (MPICH, Intel MPI, MVAPICH),
5. one process on each of several machines (:mod:`deepspeed.cluster`): ``PET_*``, SkyPilot, SageMaker,
6. nothing: one process, started by plain ``python``.

Everything here is pure: an environment goes in, a :class:`Place` comes out, so that each source can be tested without a
cluster.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from deepspeed.cluster import ClusterNode, find_cluster_node, slurm_hosts
from deepspeed.errors import CommunicationError
from deepspeed.ports import DEFAULT_PORT, free_port

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# The local rank of a process, and the number of processes that its starter has counted.
_LOCAL_RANK_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("LOCAL_RANK", ()),
    ("OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("MPI_LOCALRANKID", ("PMI_SIZE",)),
    ("MV2_COMM_WORLD_LOCAL_RANK", ("MV2_COMM_WORLD_SIZE",)),
    ("PALS_LOCAL_RANKID", ("PMI_SIZE",)),
    ("SLURM_LOCALID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)
_MPI_LOCAL_SIZE_NAMES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class Place:
    """One process among ``world_size``."""

    rank: int  # global rank, 0 to ``world_size`` - 1
    world_size: int  # number of processes
    local_rank: int  # rank among the processes of this host; also the index of its device, where it sees more than one
    # host name or address where rank 0 listens; None if an ``init_method`` takes care of the rendezvous
    address: str | None
    # port where rank 0 listens; None as for ``address``, and 0 if any free one will do (one process, nobody to meet)
    port: int | None
    source: str  # how it was found, for the log: "torchrun variables", "Slurm", ...
    # Which run the process belongs to, as the program that started it names it: the same for all ranks of a run, and
    # another one for another run. Empty if unknown.
    run: str = ""
    # whether torch's elastic agent serves the rendezvous store: it keeps the store when it starts the ranks again
    has_agent: bool = False

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Writes the place into ``environ``, where torch, other libraries and the logger look for it."""
        environ["RANK"] = str(self.rank)
        environ["WORLD_SIZE"] = str(self.world_size)
        environ["LOCAL_RANK"] = str(self.local_rank)
        if self.address is not None:
            environ["MASTER_ADDR"] = self.address
        if self.port is not None:
            environ["MASTER_PORT"] = str(self.port or free_port())


def find_place(
    environ: Mapping[str, str],
    *,
    rank: int = -1,
    world_size: int = -1,
    init_method: str | None = None,
    default_port: int = DEFAULT_PORT,
    discover: bool = True,
    device_count: int = 0,
    mpi_address: Callable[[], str | None] = lambda: None,
) -> Place:
    """Finds this process's rank, the number of ranks and the rendezvous address.

    Args:
        environ: The environment variables.
        rank: The caller's rank; -1 means "look it up".
        world_size: The caller's number of ranks; -1 means "look it up".
        init_method: A torch rendezvous URL. With one, no address is looked for.
        discover: Whether variables of Slurm, MPI and clusters count; if not, only torch's do.
        device_count: Number of devices on this host, the last resort for the local rank.
        mpi_address: Queries MPI for the host name of rank 0; called only when there is no other source.

    Raises:
        CommunicationError: The variables contradict each other or an indispensable one is missing.
    """
    found = _identity(environ, rank, world_size, discover, device_count)
    rank, world_size, source = found.rank, found.world_size, found.source
    if world_size < 1 or not 0 <= rank < world_size:
        raise CommunicationError(
            f"this process has an invalid rank: rank {rank} of {world_size} (from {source}). Ranks go from 0 to "
            "the number of processes minus 1; correct RANK and WORLD_SIZE, or the arguments rank= and "
            "world_size= of init_distributed"
        )
    address: str | None = None
    port: int | None = None
    if init_method is None or init_method.startswith("env:"):
        address, port = _rendezvous_point(environ, found, default_port, mpi_address)
    is_alone_on_node = found.node is not None
    local_rank = 0 if is_alone_on_node else _local_rank(environ, rank, world_size, address, device_count)
    has_agent = source.startswith("torchrun") and environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return Place(rank, world_size, local_rank, address, port, source, _run_of(environ, source, found.node), has_agent)


@dataclass(frozen=True)
class _FoundRank:
    """A rank, as far as it is known without the other ranks."""

    rank: int  # global rank
    world_size: int  # number of processes
    source: str  # how it was found, in words
    is_slurm: bool = False  # whether it is a task of Slurm
    node: ClusterNode | None = None  # its machine, if a cluster's variables give it


def _identity(environ: Mapping[str, str], rank: int, world_size: int, discover: bool, device_count: int) -> _FoundRank:
    if rank >= 0 and world_size >= 1:
        return _FoundRank(rank, world_size, "arguments of init_distributed")
    if rank >= 0 or world_size >= 1:
        given, missing = ("rank", "world_size") if rank >= 0 else ("world_size", "rank")
        missing_variable = missing.upper()
        if not environ.get(missing_variable):
            raise CommunicationError(
                f"init_distributed was given {given}= but not {missing}=, and {missing_variable} is not set either; "
                "give both"
            )
        return _FoundRank(
            rank if rank >= 0 else _integer(environ, "RANK"),
            world_size if world_size >= 1 else _integer(environ, "WORLD_SIZE"),
            f"argument {given}= and variable {missing_variable}",
        )
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        source = "torchrun variables" if environ.get("TORCHELASTIC_RUN_ID") else "RANK and WORLD_SIZE"
        return _FoundRank(_integer(environ, "RANK"), _integer(environ, "WORLD_SIZE"), source)
    if discover:
        found = _scheduler_identity(environ)
        if found is not None:
            return found
    if environ.get("RANK"):
        raise CommunicationError(
            f"RANK is set ({environ['RANK']}) but WORLD_SIZE is not. Start the script with `deepspeed` or `torchrun`, "
            "which set both, or set WORLD_SIZE to the number of processes"
        )
    if environ.get("WORLD_SIZE") and _integer(environ, "WORLD_SIZE") != 1:
        raise CommunicationError(
            f"WORLD_SIZE is set ({environ['WORLD_SIZE']}) but RANK is not. Start the script with `deepspeed` or "
            "`torchrun`, which set both, or set RANK to a different number from 0 on in each process"
        )
    node = find_cluster_node(environ) if discover else None
    if node is not None:
        devices = node.devices or max(device_count, 1)
        if devices > 1:
            raise CommunicationError(
                f"this is machine {node.index} of {node.count} (from {node.source}), each with {devices} ranks, but "
                "plain `python` starts one. Start the script with `deepspeed` or `torchrun`"
            )
        return _FoundRank(node.index, node.count, node.source, node=node)
    return _FoundRank(0, 1, "plain python: one process")


def _scheduler_identity(environ: Mapping[str, str]) -> _FoundRank | None:
    if environ.get("OMPI_COMM_WORLD_RANK") and environ.get("OMPI_COMM_WORLD_SIZE"):
        rank, size = _integer(environ, "OMPI_COMM_WORLD_RANK"), _integer(environ, "OMPI_COMM_WORLD_SIZE")
        return _FoundRank(rank, size, "Open MPI variables")
    if environ.get("MV2_COMM_WORLD_RANK") and environ.get("MV2_COMM_WORLD_SIZE"):
        rank, size = _integer(environ, "MV2_COMM_WORLD_RANK"), _integer(environ, "MV2_COMM_WORLD_SIZE")
        return _FoundRank(rank, size, "MVAPICH's MPI variables")
    slurm = is_slurm_task(environ)
    # mpiexec inside a Slurm allocation hands on the Slurm variables of the one task that started it: PMI_* are right.
    if environ.get("PMI_RANK") and environ.get("PMI_SIZE"):
        rank, size = _integer(environ, "PMI_RANK"), _integer(environ, "PMI_SIZE")
        if not (slurm and rank == _integer(environ, "SLURM_PROCID")):
            return _FoundRank(rank, size, "PMI variables (MPICH family)", slurm)
    if slurm:
        size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
        return _FoundRank(_integer(environ, "SLURM_PROCID"), _integer(environ, size_name), "Slurm variables", True)
    return None


def is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Returns whether ``srun`` started this process as one of several tasks.

    A shell inside an allocation (``salloc``, ``srun --pty bash``) carries the same variables, but a script started
    from it by hand is alone.
    """
    if not environ.get("SLURM_PROCID") or not (environ.get("SLURM_NTASKS") or environ.get("SLURM_STEP_NUM_TASKS")):
        return False
    return environ.get("SLURM_JOB_NAME") not in ("bash", "sh", "zsh", "interactive")


def _rendezvous_point(
    environ: Mapping[str, str], found: _FoundRank, default_port: int, mpi_address: Callable[[], str | None]
) -> tuple[str, int]:
    rank, world_size, source, slurm = found.rank, found.world_size, found.source, found.is_slurm
    port = _integer(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None
    address = environ.get("MASTER_ADDR") or None
    if world_size == 1:
        return address or "127.0.0.1", port or 0
    if port is not None and not 0 < port < 65536:
        raise CommunicationError(
            f"MASTER_PORT is {port}, which {world_size} ranks cannot use; set it to a port from 1 to 65535, "
            "the same on all ranks. With torchrun on one host use --standalone instead of --master-port 0"
        )
    if address is None and slurm:
        address = next(iter(slurm_hosts(environ)), None)
    if address is None and any(environ.get(name) == str(world_size) for name in _MPI_LOCAL_SIZE_NAMES):
        address = "127.0.0.1"
    if address is None and "MPI" in source:
        address = mpi_address()
    if found.node is not None:
        address, port = address or found.node.address, port or found.node.port
    if address is None:
        raise CommunicationError(
            f"this is rank {rank} of {world_size} (from {source}), but MASTER_ADDR is not set, so it cannot "
            "reach the other ranks. Set MASTER_ADDR to the host of rank 0 (127.0.0.1 if all ranks "
            "run on one host), or start the script with `deepspeed` or `torchrun`"
        )
    if port is None and default_port == DEFAULT_PORT:
        # Jobs that share a node must not share a port, and all tasks of a job must agree without communication.
        job = ""
        if slurm:
            job = environ.get("SLURM_JOB_ID", "")
        elif source.startswith("Open MPI"):
            job = _open_mpi_job(environ)
        if job:
            port = 15000 + (int(job) if job.isdigit() else zlib.crc32(job.encode())) % 15000
    return address, port or default_port


def _run_of(environ: Mapping[str, str], source: str, node: ClusterNode | None = None) -> str:
    """Returns the run that a process belongs to: what its starter set, or ``DS_RUN_ID``."""
    if source.startswith("torchrun") and environ["TORCHELASTIC_RUN_ID"] != "none":  # torchrun's value without --rdzv-id
        return f"torchrun run {environ['TORCHELASTIC_RUN_ID']}"
    if source.startswith("Open MPI") and _open_mpi_job(environ):
        return f"Open MPI job {_open_mpi_job(environ)}"
    if source.startswith("Slurm") and environ.get("SLURM_JOB_ID") and not environ.get("SLURM_HET_SIZE"):
        # A job that is requeued keeps its number, and its steps are counted from 0 again.
        count = environ.get("SLURM_RESTART_COUNT", "0")
        restart = f", restart {count}" if count not in ("", "0") else ""
        return f"Slurm step {environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}{restart}"
    if node is not None and node.run:
        return f"{node.source}, run {node.run}"
    return f"run {environ['DS_RUN_ID']}" if environ.get("DS_RUN_ID") else ""


def _open_mpi_job(environ: Mapping[str, str]) -> str:
    """Returns Open MPI's name of the processes of one mpirun; empty if it gives none."""
    return environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""


def run_of_adopted(environ: Mapping[str, str]) -> str:
    """Returns the name of the run of a process whose group the program has started; empty if unknown."""
    if environ.get("TORCHELASTIC_RUN_ID"):
        return _run_of(environ, "torchrun")
    return _run_of(environ, "Open MPI" if environ.get("OMPI_COMM_WORLD_RANK") else "")


def _local_rank(environ: Mapping[str, str], rank: int, world_size: int, address: str | None, device_count: int) -> int:
    of_parent: int | None = None
    for name, sizes in _LOCAL_RANK_NAMES:
        if environ.get(name):
            counted = next((_integer(environ, size) for size in sizes if environ.get(size)), world_size)
            if counted >= world_size or environ.get("SLURM_HET_SIZE"):
                return _integer(environ, name)
            of_parent = _integer(environ, name)  # one task of the starter has started several ranks by itself
    if environ.get("LOCAL_WORLD_SIZE"):
        return rank % _integer(environ, "LOCAL_WORLD_SIZE")
    if world_size == 1:
        return 0
    if device_count > 0:
        return rank % device_count
    if address is None or address in _LOOPBACK:
        return rank
    if of_parent is not None:
        return of_parent
    raise CommunicationError(
        f"LOCAL_RANK is not set on rank {rank} of {world_size}, with rendezvous at {address}, and nothing else shows "
        "how many processes run per host. Set LOCAL_RANK to the number of the process on its own host, counted from 0, "
        "or start the script with `deepspeed` or `torchrun`"
    )


def local_rank_of(environ: Mapping[str, str], rank: int, world_size: int, device_count: int) -> int:
    """Returns the local rank of a process whose global rank is already known."""
    return _local_rank(environ, rank, world_size, None, device_count)


def ranks_per_node(environ: Mapping[str, str], world_size: int, device_count: int) -> int:
    """Returns the number of ranks on this host: as the starter set it, else one per device, else all of them.

    ``device_count`` is that of the devices that this process sees; 0 where it computes on the processor.

    Raises:
        CommunicationError: A variable is not a number.
    """
    for name in ("LOCAL_WORLD_SIZE", *_MPI_LOCAL_SIZE_NAMES):
        if environ.get(name):
            return max(_integer(environ, name), 1)
    if is_slurm_task(environ) and (tasks := _slurm_tasks_here(environ)):
        return tasks
    return min(device_count, world_size) if device_count > 0 else world_size


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """Returns the tasks of a Slurm step on this node; 0 where Slurm does not set it.

    Slurm writes the tasks of all nodes as ``2(x3),1``: two on each of the first three nodes, one on the fourth.
    """
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(nodes or 1)
    node = _integer(environ, "SLURM_NODEID") if environ.get("SLURM_NODEID") else 0
    return counts[node] if node < len(counts) else 0


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise CommunicationError(
            f"{name} must be a whole number, but is {environ[name]!r}; correct the variable"
        ) from None
