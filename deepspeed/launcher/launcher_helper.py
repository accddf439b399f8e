"""``python -m deepspeed.launcher.launcher_helper``: runs a script as the rank of MPI's or Slurm's variables.

For mpirun commands that you write yourself: it sets ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` from the variables of
the program that started it, and then executes the script. The command must set ``MASTER_ADDR`` and ``MASTER_PORT``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from deepspeed.cli.command import run_command
from deepspeed.launcher.devices import share_cores
from deepspeed.launcher.launch import interpreter
from deepspeed.launcher.placing import PROGRAMS, find_placed
from deepspeed.launcher.resources import LauncherError

_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "LOCAL_SIZE")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; options must precede the script."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed.launcher.launcher_helper", allow_abbrev=False, description=__doc__
    )
    parser.add_argument(
        "--launcher", default="mpich", type=str.lower, choices=PROGRAMS, help="program whose variables are read"
    )
    parser.add_argument("--module", action="store_true", help="run the script as 'python -m', as a module")
    parser.add_argument("--no_python", action="store_true", help="execute the script directly, without Python")
    parser.add_argument("--bind_cores_to_rank", action="store_true", help="give each rank processor cores of its own")
    parser.add_argument("--bind_core_list", metavar="LIST", help="cores to divide among the ranks, such as 1,3-5")
    parser.add_argument("user_script", help="the script, module or program")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Executes the script in this process; does not return."""
    run_command("deepspeed", lambda: _become(parse_args(args)), args, keeps_output=True)


def _become(args: argparse.Namespace) -> NoReturn:
    command = [*interpreter(args), args.user_script, *args.user_args]
    environment = dict(os.environ)
    placed = find_placed(args.launcher, environment)
    environment.update({"RANK": str(placed.rank), "WORLD_SIZE": str(placed.world_size)})
    if placed.local_rank is not None:
        environment["LOCAL_RANK"] = str(placed.local_rank)
    local_size = next((environment[name] for name in _LOCAL_SIZES if environment.get(name)), None)
    if local_size is not None:
        environment["LOCAL_SIZE"] = local_size
    if args.bind_cores_to_rank or args.bind_core_list:
        if placed.local_rank is None or local_size is None:
            raise LauncherError(
                f"--bind_cores_to_rank: {args.launcher} does not set how many ranks run on this machine; export one of "
                f"{', '.join(_LOCAL_SIZES)}, or leave the option out"
            )
        cores = share_cores(args.bind_core_list, int(local_size))[placed.local_rank]
        os.sched_setaffinity(0, cores)
        environment.setdefault("OMP_NUM_THREADS", str(len(cores)))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise LauncherError(f"{command[0]}: {error.strerror}") from error


if __name__ == "__main__":
    main()
