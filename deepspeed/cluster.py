"""Finds which machine of a cluster this is, and the machines of a Slurm job, from environment variables.

Kubernetes' torch runtimes (``PET_*``), SkyPilot and SageMaker start the same command on every machine and set variables
that say which machine it is. :mod:`deepspeed.comm.base.environment` reads the variables of schedulers that start one
process per rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepspeed.errors import CommunicationError


@dataclass(frozen=True)
class ClusterNode:
    """One machine among those that run the same command."""

    index: int  # number of the machine, from 0; rank 0 runs on machine 0
    count: int  # number of machines
    devices: int | None  # number of ranks per machine; None if unknown
    address: str  # name or address of machine 0
    port: int | None  # port where rank 0 listens; None if unknown
    hosts: tuple[str, ...]  # names or addresses of all machines in order; empty if unknown
    source: str  # whose variables these are, for messages
    run: str = ""  # name of the run, the same on all its machines and for no other run; empty if unknown


def find_cluster_node(environ: Mapping[str, str]) -> ClusterNode | None:
    """Returns which of several machines this is; None without variables of a cluster, or for one machine.

    Raises:
        CommunicationError: A variable is missing or has an invalid value.
    """
    for read in _READERS:
        node = read(environ)
        if node is not None and node.count > 1:
            if not 0 <= node.index < node.count:
                raise CommunicationError(
                    f"{node.source}: machine {node.index} of {node.count}: expected a number from 0 to "
                    f"{node.count - 1}; correct the variables"
                )
            return node
    return None


def _torch_runtime(environ: Mapping[str, str]) -> ClusterNode | None:
    """Reads the arguments of torchrun that torch runtimes pass as variables."""
    source = "PET_* variables of a torch runtime"
    text = environ.get("PET_NNODES", "")
    if not text or text == "1":
        return None
    if ":" in text:
        raise CommunicationError(
            f"{source}: PET_NNODES={text} lets the number of machines change, which needs torch's elastic agent; start "
            "the script with torchrun, or set one number"
        )
    per_node = environ.get("PET_NPROC_PER_NODE", "")
    port = _number(environ, "PET_MASTER_PORT", source) if environ.get("PET_MASTER_PORT") else None
    return ClusterNode(
        index=_number(environ, "PET_NODE_RANK", source),
        count=_number(environ, "PET_NNODES", source),
        devices=int(per_node) if per_node.isdecimal() else None,
        address=_text(environ, "PET_MASTER_ADDR", source),
        port=port,
        hosts=(),
        source=source,
        run=environ.get("PET_RDZV_ID", ""),
    )


def _skypilot(environ: Mapping[str, str]) -> ClusterNode | None:
    source = "SkyPilot's variables"
    hosts = tuple(environ.get("SKYPILOT_NODE_IPS", "").split())
    if not hosts:
        return None
    devices = environ.get("SKYPILOT_NUM_GPUS_PER_NODE", "")
    return ClusterNode(
        index=_number(environ, "SKYPILOT_NODE_RANK", source),
        count=len(hosts),
        devices=int(devices) if devices.isdecimal() and int(devices) > 0 else None,
        address=hosts[0],
        port=None,
        hosts=hosts,
        source=source,
        run=environ.get("SKYPILOT_TASK_ID", ""),
    )


def _sagemaker(environ: Mapping[str, str]) -> ClusterNode | None:
    source = "SageMaker's variables"
    text = environ.get("SM_HOSTS", "")
    if not text:
        return None
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise CommunicationError(f"{source}: SM_HOSTS: expected a JSON list of names, found {text!r}; correct it")
    here = _text(environ, "SM_CURRENT_HOST", source)
    if here not in hosts:
        raise CommunicationError(f"{source}: SM_CURRENT_HOST {here!r} is not among SM_HOSTS {hosts}; correct it")
    devices = environ.get("SM_NUM_GPUS", "")
    return ClusterNode(
        index=hosts.index(here),
        count=len(hosts),
        devices=int(devices) if devices.isdecimal() and int(devices) > 0 else None,
        address=hosts[0],
        port=None,
        hosts=tuple(hosts),
        source=source,
        run=environ.get("TRAINING_JOB_NAME", ""),
    )


_READERS: tuple[Callable[[Mapping[str, str]], ClusterNode | None], ...] = (_torch_runtime, _skypilot, _sagemaker)


def _number(environ: Mapping[str, str], name: str, source: str) -> int:
    text = _text(environ, name, source)
    if not text.isdecimal():
        raise CommunicationError(f"{source}: {name}: expected a whole number, found {text!r}; correct it")
    return int(text)


def _text(environ: Mapping[str, str], name: str, source: str) -> str:
    text = environ.get(name, "")
    if not text:
        raise CommunicationError(f"{source}: {name} is not set; set it on every machine")
    return text


def slurm_hosts(environ: Mapping[str, str]) -> list[str]:
    """Returns the machines of this Slurm step, or of the job if there is no step; empty outside of Slurm.

    Raises:
        CommunicationError: A variable of Slurm is not a list of machines.
    """
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    text = next((text for name in names if (text := environ.get(name, "").strip())), "")
    return expand_nodelist(text) if text else []


def expand_nodelist(text: str) -> list[str]:
    """Returns the machines of Slurm's list ``text``.

    Examples:
        >>> expand_nodelist("gpu[003-004,9]-ib,login1")
        ['gpu003-ib', 'gpu004-ib', 'gpu9-ib', 'login1']

    Raises:
        CommunicationError: The text is not such a list.
    """
    hosts: list[str] = []
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])+", text):
        raise CommunicationError(f"Slurm's node list {text!r}: expected names and ranges like gpu[003-006,9],login1")
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
            raise CommunicationError(f"Slurm's node list: expected numbers and ranges in brackets, found {part!r}")
        for number in range(int(first), int(last or first) + 1):
            found += [f"{head}{number:0{len(first)}d}{end}" for end in _expand(tail)]
    return found
