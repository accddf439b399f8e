"""Selects the slots of machines that get a rank: from host file, filters, counts, and the devices of this machine."""

from __future__ import annotations

import argparse
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from deepspeed.cluster import slurm_hosts
from deepspeed.launcher.devices import LocalDevices, find_devices, usable_cores
from deepspeed.launcher.resources import (
    LauncherError,
    Slots,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
)
from deepspeed.logging import logger
from deepspeed.ports import is_here

_THIS_MACHINE = "localhost"

# Tasks or devices per node, by what the user requested; most specific first.
_COUNTS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


@dataclass(frozen=True)
class RankSelection:
    """Lists the devices that get a rank."""

    hosts: dict[str, list[int | str]]  # devices or slots of each machine, in the order of the ranks
    needs_launcher: bool = False  # whether a machine other than this one is among them


def select_slots(args: argparse.Namespace, environment: MutableMapping[str, str]) -> RankSelection:
    """Applies the options to the available machines and devices.

    Raises:
        LauncherError: The requested slots do not exist, or the options contradict each other.
        CommunicationError: Slurm's node list is malformed.
    """
    _check_counts(args)
    pool: Slots | None = fetch_hostfile(args.hostfile, lambda: _slots_per_host(args, environment))
    if pool is None and args.launcher == "slurm" and "SLURM_JOB_ID" in environment and not args.no_ssh:
        pool = slots_of_allocation(environment, args.num_gpus)
        source = "the Slurm allocation"
    else:
        source = args.hostfile
    if pool is not None:
        chosen = _choose(args, pool, source)
        if args.no_ssh:
            return RankSelection(_named(chosen))
        if len(chosen) > 1 or args.force_multi or not _is_this_machine(next(iter(chosen))):
            return RankSelection(_named(chosen), needs_launcher=True)
        slots = next(iter(chosen.values()))
        filtered = bool(args.include or args.exclude)
        return RankSelection({_THIS_MACHINE: _local_devices(source, slots, find_devices(environment, filtered))})
    if args.num_nodes > 1:
        return _alike_nodes(args, environment)
    return RankSelection({_THIS_MACHINE: _local_slots(args, environment)})


def _slots_per_host(args: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    if args.num_gpus > 0:
        return int(args.num_gpus)
    count = max(len(find_devices(environment).ids), 1)
    logger.info(f"{args.hostfile} has no slots=N: {count} rank(s) on each machine, as this one has devices")
    return count


def _check_counts(args: argparse.Namespace) -> None:
    if args.include and args.exclude:
        raise LauncherError("--include and --exclude exclude each other; use one of them")
    for name in ("num_gpus", "num_nodes"):
        count = getattr(args, name)
        if count != -1 and (args.include or args.exclude):
            raise LauncherError(f"--{name} and --include/--exclude exclude each other; use one of them")
        if count != -1 and count < 1:
            raise LauncherError(f"--{name} {count}: expected at least 1; leave the option out to use all")


def _choose(args: argparse.Namespace, pool: Slots, source: str) -> dict[str, list[int]]:
    chosen = parse_inclusion_exclusion(pool, args.include, args.exclude)
    if not chosen:
        if args.include:
            raise LauncherError(f"--include {args.include}: {source} gives these hosts no slots; give them some")
        raise LauncherError(f"--exclude {args.exclude}: no slot of {source} is left; leave one of them in")
    is_elastic = args.min_elastic_nodes != -1
    needed = args.min_elastic_nodes if is_elastic else args.num_nodes
    if needed > len(chosen):
        option = "minimum number of elastic nodes" if is_elastic else "--num_nodes"
        raise LauncherError(f"{option} {needed}: {source} has {len(chosen)} host(s); give at most as many")
    if args.num_nodes != -1:
        chosen = dict(list(chosen.items())[: args.num_nodes])
    for host, slots in chosen.items():
        if not slots:
            raise LauncherError(f"{source}: host {host!r} has no slots; give it some or remove its line")
        if args.num_gpus > len(slots):
            raise LauncherError(
                f"--num_gpus {args.num_gpus}: {source} gives host {host!r} {len(slots)} slot(s); give at most as many"
            )
    return {host: slots if args.num_gpus == -1 else slots[: args.num_gpus] for host, slots in chosen.items()}


def _named(chosen: dict[str, list[int]]) -> dict[str, list[int | str]]:
    return {host: list(slots) for host, slots in chosen.items()}


def _is_this_machine(host: str) -> bool:
    return host == socket.gethostname().partition(".")[0] or is_here(host)


def _local_devices(source: str, slots: Sequence[int], devices: LocalDevices) -> list[int | str]:
    if devices.is_cpu:
        return list(slots)
    if max(slots) >= len(devices.ids):
        raise LauncherError(
            f"{source} counts on device {max(slots)}, but this machine shows {len(devices.ids)} {devices.kind} "
            "device(s); correct its slots"
        )
    return [devices.ids[slot] for slot in slots]


def _alike_nodes(args: argparse.Namespace, environment: MutableMapping[str, str]) -> RankSelection:
    """Returns the machines of a run without host file, each started by hand; all have the devices of this one."""
    if not args.no_ssh:
        raise LauncherError(
            f"--num_nodes {args.num_nodes}: only this machine is known; {args.hostfile} does not exist. Name the "
            "machines in a host file, or call this on each of them with --no_ssh --node_rank N --master_addr HOST"
        )
    if not args.master_addr:
        raise LauncherError("--no_ssh without a host file: give --master_addr, the address of the machine of rank 0")
    slots = _local_slots(args, environment)
    return RankSelection({f"node-{index}": slots for index in range(args.num_nodes)})


def _local_slots(args: argparse.Namespace, environment: MutableMapping[str, str]) -> list[int | str]:
    filtered = bool(args.include or args.exclude)
    devices = find_devices(environment, ignore_visible=filtered)
    if devices.is_cpu:
        return _cpu_slots(args)
    if filtered:
        chosen = parse_resource_filter({_THIS_MACHINE: list(range(len(devices.ids)))}, args.include, args.exclude)
        return _nonempty(args, chosen.get(_THIS_MACHINE, []))
    if args.num_gpus > len(devices.ids):
        raise LauncherError(
            f"--num_gpus {args.num_gpus}: this machine shows {len(devices.ids)} {devices.kind} device(s); "
            "ask for at most that many"
        )
    return list(devices.ids if args.num_gpus == -1 else devices.ids[: args.num_gpus])


def _cpu_slots(args: argparse.Namespace) -> list[int | str]:
    if args.include or args.exclude:
        # Slots of a CPU are only numbers, without a limit.
        numbers = [part.partition(":")[2].split(",") for part in args.include.split("@")]
        named = [int(item) for items in numbers for item in items if item.strip().isdecimal()]
        pool = {_THIS_MACHINE: max(usable_cores(), *(number + 1 for number in named), 1)}
        chosen = parse_inclusion_exclusion(pool, args.include, args.exclude)
        return _nonempty(args, chosen.get(_THIS_MACHINE, []))
    if args.num_gpus == -1:
        logger.info("no accelerator device here: 1 rank on the CPU; --num_gpus N starts more")
        return [0]
    return list(range(args.num_gpus))


def _nonempty(args: argparse.Namespace, slots: Sequence[int]) -> list[int | str]:
    if not slots:
        raise LauncherError(f"--exclude {args.exclude}: no device is left; leave one of them in")
    return list(slots)


def hosts_of_step(environment: Mapping[str, str]) -> list[str]:
    """Returns the machines of this Slurm step, or of the job if there is no step.

    Raises:
        LauncherError: This is no Slurm job.
        CommunicationError: Slurm's node list is malformed.
    """
    hosts = slurm_hosts(environment)
    if not hosts:
        raise LauncherError(
            "there is no Slurm job here (SLURM_JOB_NODELIST is not set): call this inside sbatch or salloc, or give "
            "--hostfile and --master_addr"
        )
    return hosts


def slots_of_allocation(environment: Mapping[str, str], per_node: int) -> dict[str, int]:
    """Returns the slots per machine of the allocation: ``per_node``, or for -1 as many as its devices or tasks.

    Raises:
        LauncherError: This is no Slurm job, or the number of ranks per machine is unknown.
        CommunicationError: Slurm's node list is malformed.
    """
    hosts = hosts_of_step(environment)
    count = per_node
    for name in _COUNTS if per_node == -1 else ():
        if (found := _count(environment.get(name, "").strip(), is_of_devices="GPUS" in name)) > 0:
            count = found
            break
    if count < 1:
        raise LauncherError(
            f"--launcher slurm: the number of ranks on each of {len(hosts)} machine(s) is unknown; ask Slurm for "
            "--gpus-per-node or --ntasks-per-node, or give --num_gpus N"
        )
    return dict.fromkeys(hosts, count)


def _count(text: str, *, is_of_devices: bool) -> int:
    """Returns the tasks or devices per machine in "4", "4(x2)" or (devices) "a100-sxm4-80gb:2,1g.5gb:7"; else 0."""
    if match := re.fullmatch(r"(\d+)(\(x\d+\))?", text):
        return int(match[1])
    if not is_of_devices or not re.fullmatch(r"([^,]+:)?\d+(,([^,]+:)?\d+)*", text):
        return 0
    return sum(int(part.rpartition(":")[2]) for part in text.split(","))


def processor_options(environment: Mapping[str, str], per_node: int) -> tuple[str, ...]:
    """Returns the option of srun by which the ranks get the processors of the allocation.

    Since Slurm 22.05 srun ignores the ``--cpus-per-task`` of sbatch. It refuses more tasks than the allocation has
    processors on a machine, unless an option lets them share.
    """
    # "8(x2),4": 8 processors on each of two machines, 4 on the third.
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    processors = min(map(int, counts), default=per_node)
    if processors >= per_node:
        per_task = environment.get("SLURM_CPUS_PER_TASK", "")
        fits = per_task.isdecimal() and int(per_task) * per_node <= processors
        return (f"--cpus-per-task={per_task}",) if fits else ()
    logger.warning(
        f"--launcher slurm: a machine of the allocation has {processors} processor(s), which {per_node} ranks share; "
        f"ask Slurm for more, such as --cpus-per-task with --ntasks-per-node={per_node}"
    )
    return ("--overcommit",)
