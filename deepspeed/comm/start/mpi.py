"""Finds the host of rank 0 of an MPI job: from MPI's process manager, mpi4py, or a list of hosts."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from deepspeed.logging import logger
from deepspeed.ports import address_towards

_RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK")
_QUERY = Path(__file__).with_name("mpi_query.py")
# The query waits for all ranks, and the slowest may still be importing torch.
_QUERY_SECONDS = 120.0
# Files with a host per line, the first of them rank 0's, where nothing places ranks otherwise.
_HOST_FILES = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE")
# Addresses that no machine has: the route to them is the default one.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


def find_first_host(environ: Mapping[str, str]) -> str | None:
    """Returns the name or address of rank 0's host; None if no source has it. All ranks of the MPI job must call it.

    mpi4py is tried first if installed: a program with mpi4py may start MPI itself, which is allowed once per process.
    """
    host = None
    with contextlib.suppress(ImportError):
        from mpi4py import MPI  # type: ignore[import-not-found]

        host = reachable(MPI.COMM_WORLD.bcast(f"{socket.gethostname()} {own_address(os.environ)}", root=0))
    return host or _query_manager(environ) or _first_of_files(environ)


def _query_manager(environ: Mapping[str, str]) -> str | None:
    descriptors = [int(environ["PMI_FD"])] if environ.get("PMI_FD", "").isdecimal() else []
    if not environ.get("PMIX_NAMESPACE") and not descriptors:
        return None
    name = environ.get("PMIX_HOSTNAME") or environ.get("MPIR_CVAR_CH3_INTERFACE_HOSTNAME") or socket.gethostname()
    command = [sys.executable, "-S", "-E", str(_QUERY), f"{name} {own_address(environ)}"]
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_QUERY_SECONDS,
        )
    except subprocess.TimeoutExpired:
        logger.warning(
            f"rank {_rank(environ)}: MPI's process manager did not give the address of rank 0 within "
            f"{_QUERY_SECONDS:.0f} s. Set MASTER_ADDR if ranks do not find each other"
        )
        return None
    if done.returncode != 0:
        logger.warning(
            f"rank {_rank(environ)}: MPI's process manager does not give the address of rank 0: "
            f"{done.stderr.strip()[-300:]}. Set MASTER_ADDR if ranks do not find each other"
        )
        return None
    return reachable(done.stdout)


def _rank(environ: Mapping[str, str]) -> str:
    """Returns the rank that MPI gave this process, for a message; "?" if no known variable has it."""
    return next((environ[name] for name in _RANK_NAMES if environ.get(name)), "?")


def reachable(text: str) -> str | None:
    """Returns the name in ``NAME ADDRESS`` if it resolves here to a machine of the network, else the address.

    On other hosts a name may be unknown, or resolve to the loopback interface.
    """
    name, _, address = text.strip().partition(" ")
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)} if name else set()
    except OSError:
        found = set()
    is_known = bool(found) and not any(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found)
    return name if is_known else address or name or None


def own_address(environ: Mapping[str, str]) -> str:
    """Returns an address of this host that others reach: of the route to mpirun's host, else of the default route.

    Empty if the host has no network.
    """
    # "JOB;tcp://ADDRESS[,ADDRESS...]:PORT[;tcp6://[ADDRESS]:PORT]"
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    listed = [address for part in re.findall(r"tcp6?://([^;]*):\d+", uri) for address in part.strip("[]").split(",")]
    return next(filter(None, map(address_towards, (*listed, *_ANYWHERE))), "")


def _first_of_files(environ: Mapping[str, str]) -> str | None:
    """Returns the first host in the host files named by the scheduler or MPI's options; None if none can be read."""
    for name in _HOST_FILES:
        try:
            lines = Path(environ[name]).read_text(encoding="utf-8").splitlines() if environ.get(name) else []
        except OSError:  # perhaps only mpirun's machine has the file
            continue
        for line in lines:
            words = line.partition("#")[0].split()
            if words:
                return words[0].partition(":")[0]
    listed = environ.get("LSB_HOSTS", "").split()
    return listed[0] if listed else None
