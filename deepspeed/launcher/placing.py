"""Finds the rank of a process that MPI or Slurm has started, from their variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepspeed.launcher.resources import LauncherError

# Per program: names of the variables for rank, number of ranks and local rank; the first that is set is used.
_VARIABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "openmpi": (("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",)),
    "mpich": (("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID")),
    "impi": (("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",)),
    "mvapich": (
        ("MV2_COMM_WORLD_RANK", "PMI_RANK"),
        ("MV2_COMM_WORLD_SIZE", "PMI_SIZE"),
        ("MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    ),
    "slurm": (("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",)),
}
PROGRAMS = tuple(_VARIABLES)


@dataclass(frozen=True)
class LaunchedProcess:
    """One process started by MPI or Slurm."""

    rank: int  # its number
    world_size: int  # the number of processes
    local_rank: int | None  # its number on its machine; None where the program does not pass it


def find_placed(program: str, environment: Mapping[str, str]) -> LaunchedProcess:
    """Reads the variables of one of :data:`PROGRAMS`. Raises LauncherError: they are missing or not numbers."""
    rank, size, local = (_first(program, names, environment) for names in _VARIABLES[program])
    if rank is None or size is None:
        names = ", ".join(_VARIABLES[program][0] + _VARIABLES[program][1])
        raise LauncherError(
            f"{program}: expected the variables {names}, found none: this process was not started by {program}; start "
            "it so, or choose another launcher"
        )
    return LaunchedProcess(rank, size, local)


def _first(program: str, names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    for name in names:
        if text := environment.get(name, "").strip():
            if not text.isdecimal():
                raise LauncherError(f"{program}: {name}: expected a whole number, found {text!r}; correct the variable")
            return int(text)
    return None
