"""What a Slurm allocation says of its machines."""

from __future__ import annotations

import re
from collections.abc import Mapping

from deepspeed.launcher.resources import LauncherError

_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
# Tasks or devices per node, by what the user asked for; most telling first.
_COUNTS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


def expand_nodelist(text: str) -> list[str]:
    """The hosts of a list such as ``gpu[003-004,9]-ib,login1``.

    Raises:
        LauncherError: The text is no such list.
    """
    hosts: list[str] = []
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])+", text):
        raise LauncherError(f"Slurm's node list {text!r}: expected names and ranges like gpu[003-006,9],login1")
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        hosts += _expand(part.strip())
    return hosts


def _expand(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    numbers, _, tail = rest.partition("]")
    found = []
    for item in numbers.split(","):
        first, dash, last = item.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise LauncherError(f"Slurm's node list: expected numbers and ranges in brackets, found {part!r}")
        for number in range(int(first), int(last or first) + 1):
            found += [f"{head}{number:0{len(first)}d}{end}" for end in _expand(tail)]
    return found


def hosts_of_step(environment: Mapping[str, str]) -> list[str]:
    """The machines of this step, or of the whole job where no step says.

    Raises:
        LauncherError: This is no Slurm job.
    """
    for name in _NODE_LISTS:
        if text := environment.get(name, "").strip():
            return expand_nodelist(text)
    raise LauncherError(
        "there is no Slurm job here (SLURM_JOB_NODELIST is not set): call this inside sbatch or salloc, or give "
        "--hostfile and --master_addr"
    )


def slots_of_allocation(environment: Mapping[str, str], per_node: int) -> dict[str, int]:
    """Slots per machine of the allocation.

    Args:
        environment: Slurm's variables.
        per_node: Ranks per machine; -1 for what the allocation says of devices or tasks.

    Raises:
        LauncherError: This is no Slurm job, or nothing says how many ranks a machine gets.
    """
    hosts = hosts_of_step(environment)
    count = per_node
    for name in _COUNTS if per_node == -1 else ():
        # "4", "4(x2)" or "h100:4"
        match = re.fullmatch(r"(?:[a-zA-Z]\w*:)?(\d+)(?:\(x\d+\))?", environment.get(name, "").strip())
        if match is not None and int(match[1]) > 0:
            count = int(match[1])
            break
    if count < 1:
        raise LauncherError(
            f"--launcher slurm: nothing says how many ranks each of {len(hosts)} machine(s) gets; ask Slurm for "
            "--gpus-per-node or --ntasks-per-node, or give --num_gpus N"
        )
    return dict.fromkeys(hosts, count)
