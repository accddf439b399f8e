"""``python -m deepspeed.launcher.launch``: starts this machine's ranks of a world that is already decided.

The ``deepspeed`` command calls :func:`main` with the world it has resolved.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deepspeed.errors import DeepSpeedError, NotYetSupportedError
from deepspeed.launcher.devices import find_devices, usable_cores
from deepspeed.launcher.environment import World, read_environment_files, screen_width, threads_per_rank
from deepspeed.launcher.ports import DEFAULT_PORT, PortClaim, claim_port
from deepspeed.launcher.resources import LauncherError, decode_world_info
from deepspeed.logging import logger, set_log_level_from_string

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that concern how one rank is started, the same for both commands."""
    parser.add_argument("--module", action="store_true", help="run the script as 'python -m', as a module")
    parser.add_argument("--no_python", action="store_true", help="execute the script directly, without Python")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=<n> to the script")
    parser.add_argument("--save_pid", action="store_true", help="write <pid>.deepspeed to the temporary directory")
    parser.add_argument("--enable_each_rank_log", metavar="DIR", help="also write each rank's output to a file in DIR")
    parser.add_argument("--log_level", default="info", choices=LOG_LEVELS, help="what the launcher itself logs")
    parser.add_argument("-q", "--quiet", action="store_true", help="the same as --log_level error")
    parser.add_argument("--bind_cores_to_rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bind_core_list", default=None, help=argparse.SUPPRESS)


def refuse_core_binding(args: argparse.Namespace) -> None:
    """Refuses the options for binding ranks to processor cores by name."""
    for name in ("bind_cores_to_rank", "bind_core_list"):
        if getattr(args, name):
            raise NotYetSupportedError(
                f"--{name}: binding ranks to cores comes with a later release; leave the option out"
            )


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed.launcher.launch", allow_abbrev=False, description=__doc__
    )
    parser.add_argument("--node_rank", type=int, default=0, help="index of this machine in the world")
    parser.add_argument("--master_addr", default="127.0.0.1", help="where rank 0 is reached")
    parser.add_argument("--master_port", type=int, default=None, help=f"its port (default {DEFAULT_PORT})")
    parser.add_argument("--world_info", default=None, help="URL-safe base64 of JSON {host: [device, ...]}")
    add_rank_options(parser)
    parser.add_argument("training_script", help="the script, module or program to run on each rank")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the ranks of this machine; exits with the code of the first that failed.

    Args:
        args: The command line; None means that of this process, and then a wrong one ends it with one sentence.

    Raises:
        DeepSpeedError: The command line cannot be carried out (only when ``args`` is given).
        SystemExit: A rank failed or the launcher was told to stop.
    """
    try:
        code = _launch(parse_args(args))
    except DeepSpeedError as error:
        if args is not None:
            raise
        sys.exit(f"deepspeed: {error}")
    if code:
        sys.exit(code)


def _launch(args: argparse.Namespace) -> int:
    if not hasattr(os, "fork"):
        raise NotYetSupportedError(
            "the launcher needs a POSIX system; here, start each rank with RANK and WORLD_SIZE set"
        )
    set_log_level_from_string("error" if args.quiet else args.log_level)
    refuse_core_binding(args)
    _check_script(args)
    hosts = _hosts(args)
    if len(hosts) > 1:
        claim = PortClaim(args.master_port or DEFAULT_PORT)  # all machines must use the same one: none may choose
    else:
        claim = claim_port(args.master_addr, args.master_port)
    with claim, _pid_file(args.save_pid):
        return _run(args, _world(args, hosts, claim.port), hosts[args.node_rank])


def _run(args: argparse.Namespace, world: World, ids: list[int | str]) -> int:
    """Starts the ranks of this machine and waits for them."""
    from deepspeed.launcher.job import Job
    from deepspeed.launcher.supervisor import Worker

    devices = find_devices(os.environ)
    common = _common_environment(world, devices.is_cpu)
    for name in devices.visible_variables:
        common[name] = ",".join(map(str, ids))
    threads = f", OMP_NUM_THREADS={common['OMP_NUM_THREADS']}" if devices.is_cpu else ""
    logger.info(
        f"starting {world.local_size} of {world.world_size} rank(s) on {devices.kind}, meeting at "
        f"{world.master_addr}:{world.master_port}{threads}"
    )
    workers = [
        Worker(world.first_rank + local, local, _command(args, local), {**common, **world.variables(local)})
        for local in range(world.local_size)
    ]
    logs = _log_files(args.enable_each_rank_log, [worker.rank for worker in workers])
    return Job(workers, socket.gethostname(), logs).run()


def _check_script(args: argparse.Namespace) -> None:
    if args.module and args.no_python:
        raise LauncherError("--module and --no_python exclude each other; use one of them")
    if not (args.module or args.no_python or os.path.exists(args.training_script)):
        raise LauncherError(f"{args.training_script}: no such script in {os.getcwd()}; options must precede the script")


def _hosts(args: argparse.Namespace) -> list[list[int | str]]:
    """The devices of each machine of the world."""
    if args.world_info is None:
        raise LauncherError("--world_info is missing: it says which ranks to start; the deepspeed command passes it")
    hosts = list(decode_world_info(args.world_info).values())
    if not 0 <= args.node_rank < len(hosts):
        raise LauncherError(f"--node_rank {args.node_rank}: --world_info has {len(hosts)} host(s), counted from 0")
    return hosts


def _world(args: argparse.Namespace, hosts: list[list[int | str]], port: int) -> World:
    """This machine's place among them."""
    return World(
        first_rank=sum(len(slots) for slots in hosts[: args.node_rank]),
        local_size=len(hosts[args.node_rank]),
        world_size=sum(len(slots) for slots in hosts),
        node_rank=args.node_rank,
        num_nodes=len(hosts),
        master_addr=args.master_addr,
        master_port=port,
    )


def _common_environment(world: World, on_cpu: bool) -> dict[str, str]:
    """What all ranks of this machine find, before their own place."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    environment = dict(os.environ)
    # What the user typed for this run beats what lies in a file.
    added = {key: value for key, value in read_environment_files(name).items() if key not in environment}
    if added:
        logger.info(f"set from {name}: {', '.join(added)}")
    environment.update(added)
    if on_cpu:
        environment.update(threads_per_rank(environment, usable_cores(), world.local_size))
    label = len(f"[rank {world.world_size - 1}] ") if world.local_size > 1 else 0
    return {**screen_width(label), **environment}


def _command(args: argparse.Namespace, local_rank: int) -> tuple[str, ...]:
    python = () if args.no_python else (sys.executable, "-u", *(("-m",) if args.module else ()))
    place = () if args.no_local_rank else (f"--local_rank={local_rank}",)
    return (*python, args.training_script, *place, *args.training_script_args)


def _log_files(folder: str | None, ranks: list[int]) -> list[Path] | None:
    if folder is None:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    started = time.strftime("%Y%m%d%H%M%S")
    return [Path(folder) / f"{started}_rank{rank}.log" for rank in ranks]


@contextmanager
def _pid_file(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"{os.getpid()}.deepspeed"
    path.write_text(str(os.getpid()))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
