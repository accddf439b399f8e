"""``python -m deepspeed.launcher.launch``: starts the ranks of this machine; its options describe all ranks of the run.

The ``deepspeed`` command calls :func:`main` with the world it has resolved, here or on every machine of the run. Where
MPI or Slurm starts one process per rank, each of them is this module with ``--placed_by``, and starts one rank.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed.cli.command import run_command
from deepspeed.errors import NotYetSupportedError
from deepspeed.launcher.devices import LocalDevices, find_devices, share_cores, usable_cores
from deepspeed.launcher.environment import (
    SECRET,
    LaunchWorld,
    environment_file_name,
    new_run_id,
    read_environment_files,
    screen_width,
    threads_per_rank,
)
from deepspeed.launcher.failures import find_failure_file
from deepspeed.launcher.placing import PROGRAMS, find_placed
from deepspeed.launcher.ports import PortClaim, RequestedPort, agreed_port, claim_port
from deepspeed.launcher.resources import LauncherError, decode_world_info
from deepspeed.launcher.screen import open_standard_streams
from deepspeed.launcher.selection import hosts_of_step
from deepspeed.logging import FORMAT_VARIABLE, TERMINAL, logger, set_log_level_from_string
from deepspeed.ports import DEFAULT_PORT
from deepspeed.release import VERSION

if TYPE_CHECKING:
    from deepspeed.launcher.supervisor import Worker

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
# Variables with the rank of a process. A launcher must not pass its own to ranks.
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT")


MAX_RESTARTS = 100  # of torch's elastic agent, before it gives up


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that concern how one rank is started, the same for both commands."""
    parser.add_argument("--module", action="store_true", help="run the script as 'python -m', as a module")
    parser.add_argument("--no_python", action="store_true", help="execute the script directly, without Python")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=<n> to the script")
    parser.add_argument("--save_pid", action="store_true", help="write <pid>.deepspeed to the temporary directory")
    parser.add_argument("--enable_each_rank_log", metavar="DIR", help="also write each rank's output to a file in DIR")
    parser.add_argument("--log_level", default="info", choices=LOG_LEVELS, help="log level of the launcher")
    parser.add_argument("-q", "--quiet", action="store_true", help="the same as --log_level error")
    parser.add_argument("--bind_cores_to_rank", action="store_true", help="give each rank processor cores of its own")
    parser.add_argument("--bind_core_list", metavar="LIST", help="cores to divide among the ranks, such as 1,3-5")
    parser.add_argument(
        "--grace",
        type=seconds,
        metavar="SECONDS",
        help="seconds that ranks have to end after a signal to this command (5); see preemption in the configuration",
    )
    parser.add_argument(
        "--signal",
        type=stop_signal,
        metavar="NAME",
        help="signal with which the scheduler announces the end of the run, such as USR1: passed on to the ranks, "
        "which finish their step and save if preemption is enabled in the configuration",
    )
    parser.add_argument(
        "--min_elastic_nodes", type=int, default=-1, help="minimum number of machines of an elastic run (1)"
    )
    parser.add_argument(
        "--max_elastic_nodes", type=int, default=-1, help="maximum number of machines of an elastic run (all)"
    )


def seconds(text: str) -> float:
    """Returns a duration in seconds. Raises argparse.ArgumentTypeError: the text is no number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:  # also NaN
        raise argparse.ArgumentTypeError(f"expected a number of seconds of at least 0, found {text!r}")
    return number


def stop_signal(text: str) -> str:
    """Returns the full name of a signal given as ``USR1`` or ``SIGUSR1``.

    Raises:
        argparse.ArgumentTypeError: The signal is unknown, or a program cannot wait for it.
    """
    from deepspeed.config.sections.checkpoint import CATCHABLE

    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    if name not in CATCHABLE:
        raise argparse.ArgumentTypeError(
            f"expected the name of a signal that a program can wait for, such as USR1 or SIGUSR1, found {text!r}"
        )
    return name


def interpreter(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the start of a rank's command, before the script: Python, unless ``--no_python``.

    Raises:
        LauncherError: ``--module`` and ``--no_python`` are both given.
    """
    if args.module and args.no_python:
        raise LauncherError("--module and --no_python exclude each other; use one of them")
    if args.no_python:
        return ()
    return (sys.executable, "-u", "-m") if args.module else (sys.executable, "-u")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed.launcher.launch", allow_abbrev=False, description=__doc__
    )
    parser.add_argument("--node_rank", type=int, default=0, help="index of this machine in the world")
    parser.add_argument("--master_addr", default="127.0.0.1", help="address of rank 0")
    parser.add_argument(
        "--master_port", type=int, default=None, help=f"port of rank 0 (default MASTER_PORT, or {DEFAULT_PORT})"
    )
    parser.add_argument("--run_id", default="", help="name of the run, the same for all its launchers")
    parser.add_argument(
        "--enable_elastic_training", action="store_true", help="let torch's elastic agent restart ranks"
    )
    parser.add_argument(
        "--placed_by", choices=PROGRAMS, help="start one rank: the one in the environment variables of this program"
    )
    parser.add_argument("--shares_screen", action="store_true", help="all launchers of the run write to one terminal")
    parser.add_argument("--world_info", default=None, help="URL-safe base64 of JSON {host: [device, ...]}")
    add_rank_options(parser)
    parser.add_argument("training_script", help="the script, module or program to run on each rank")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the ranks of this machine; exits with the code of the first that failed."""
    run_command("deepspeed", lambda: _launch(parse_args(args)), args, keeps_output=True)


def _launch(args: argparse.Namespace) -> int:
    if not hasattr(os, "fork"):
        raise NotYetSupportedError(
            "the launcher needs a POSIX system; here, start each rank with RANK and WORLD_SIZE set"
        )
    open_standard_streams()  # before any socket
    set_log_level_from_string("error" if args.quiet else args.log_level)
    interpreter(args)
    if not (args.module or args.no_python or os.path.exists(args.training_script)):
        raise LauncherError(
            f"{args.training_script}: no such script in {os.getcwd()}; correct the path, and put options of the "
            "launcher before it"
        )
    hosts = _hosts(args)
    if args.placed_by == "slurm" and not args.master_addr:
        args.master_addr = hosts_of_step(os.environ)[0]
    with _claim(args, hosts) as claim, _pid_file(args.save_pid):
        return _run(args, _world(args, hosts, claim.port), hosts)


def _claim(args: argparse.Namespace, hosts: list[list[int | str]]) -> PortClaim:
    """Claims the port of the rendezvous. If this launcher is the only one, it also sets the run's name."""
    requested = RequestedPort.of(args.master_port)
    if len(hosts) == 1 and not args.placed_by:
        args.run_id = args.run_id or new_run_id()
        return claim_port(args.master_addr, requested)
    first = find_placed(args.placed_by, os.environ).rank if args.placed_by else args.node_rank
    return agreed_port(requested, holds_rank_0=first == 0, is_claimed=bool(args.run_id))


def _run(args: argparse.Namespace, world: LaunchWorld, hosts: list[list[int | str]]) -> int:
    from deepspeed.launcher.handshake import LauncherInfo
    from deepspeed.launcher.link import LauncherLink
    from deepspeed.launcher.local_run import LocalRun

    host = socket.gethostname()
    secret = os.environ.pop(SECRET, "")  # not for the ranks
    if args.signal is not None:
        from deepspeed.config.sections.checkpoint import SIGNAL_VARIABLE

        os.environ[SIGNAL_VARIABLE] = args.signal
    if args.enable_elastic_training:
        nodes = elastic_nodes(args.min_elastic_nodes, args.max_elastic_nodes, world.num_nodes)
        workers, is_whole_run = _elastic_workers(args, world, hosts, nodes), nodes[1] == 1
    else:
        workers, is_whole_run = _workers(args, world, hosts), len(world.sizes) == 1
    link = None
    if len(world.sizes) > 1 and not args.enable_elastic_training:  # torch's agents have connections of their own
        me = LauncherInfo(world.launcher, host, world.sizes, world.master_port, VERSION, world.run_id, secret)
        link = LauncherLink(me, world.master_addr)
    return LocalRun(
        workers,
        host,
        _log_files(args.enable_each_rank_log, [worker.rank for worker in workers]),
        link=link,
        is_whole_run=is_whole_run,
        labeled=world.world_size > 1 and not args.enable_elastic_training,
        shares_screen=args.shares_screen,
        failure_file=find_failure_file(os.environ),
        grace=args.grace,
        stop_signal=None if args.signal is None else signal.Signals[args.signal],
    ).run()


def _workers(args: argparse.Namespace, world: LaunchWorld, hosts: list[list[int | str]]) -> list[Worker]:
    from deepspeed.launcher.supervisor import Worker

    devices = find_devices(os.environ)
    cores = share_cores(args.bind_core_list, world.local_size) if _binds(args) else None
    has_log_files = args.enable_each_rank_log is not None
    common = _common_environment(world, devices.is_cpu, len(cores[0]) if cores else None, has_log_files=has_log_files)
    visible = _visible(devices, hosts[world.node_rank])
    # Slurm gives each task the devices it may use.
    common = {**visible, **common} if args.placed_by == "slurm" else {**common, **visible}
    ranks = [rank for rank, _ in world.places]
    numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    where = f" ({numbers}, node {world.node_rank} of {world.num_nodes})" if len(world.sizes) > 1 else ""
    threads = f", OMP_NUM_THREADS={common['OMP_NUM_THREADS']}" if devices.is_cpu else ""
    logger.info(
        f"starting {len(ranks)} of {world.world_size} rank(s){where} on {devices.kind}, rendezvous at "
        f"{world.master_addr}:{world.master_port}{threads}"
    )
    return [
        Worker(
            rank,
            local,
            _command(args, local),
            {**common, **world.variables(rank, local)},
            cores=cores[local] if cores else None,
        )
        for rank, local in world.places
    ]


def _elastic_workers(
    args: argparse.Namespace, world: LaunchWorld, hosts: list[list[int | str]], nodes: tuple[int, int]
) -> list[Worker]:
    """Runs torch's elastic agent instead of the ranks, which it starts itself."""
    from deepspeed.launcher.supervisor import Worker

    if args.placed_by or _binds(args):
        option = "--bind_cores_to_rank" if _binds(args) else f"--launcher {args.placed_by}"
        raise LauncherError(
            f"--elastic_training and {option} exclude each other: torch's agent starts the ranks of a machine itself; "
            "leave one of them out"
        )
    devices = find_devices(os.environ)
    common = _common_environment(world, devices.is_cpu, None, has_log_files=args.enable_each_rank_log is not None)
    common.update(_visible(devices, hosts[world.node_rank]))
    for name in _PLACE:
        common.pop(name, None)
    # Then rank 0 serves a new store after each restart: a script that starts torch's process group itself would find in
    # an agent's store entries of earlier ranks. Ranks of `init_distributed` do not need this.
    common.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    flags = [f"--{name}" for name in ("module", "no_python") if getattr(args, name)]
    script = (args.training_script, *args.training_script_args)
    run_id = world.run_id or f"deepspeed-{world.master_port}"
    # The only agent of a run can take any port, so that no other program takes it first.
    address, port = ("127.0.0.1", 0) if nodes[1] == 1 else (world.master_addr, world.master_port)
    command = agent_command(nodes, world.local_size, address, port, run_id, script, flags)
    where = f", rendezvous at {address}:{port}" if port else ""
    logger.info(
        f"elastic run on {nodes[0]} to {nodes[1]} machine(s): torch's elastic agent starts "
        f"{world.local_size} rank(s) here{where}"
    )
    return [Worker(0, 0, command, common, name="torch's elastic agent")]


def _visible(devices: LocalDevices, slots: Sequence[int | str]) -> dict[str, str]:
    """Returns the variables that make only the devices behind ``slots`` visible to ranks."""
    return {name: ",".join(map(str, slots)) for name in devices.visible_variables}


def _binds(args: argparse.Namespace) -> bool:
    return bool(args.bind_cores_to_rank or args.bind_core_list)


def _hosts(args: argparse.Namespace) -> list[list[int | str]]:
    if args.world_info is None:
        raise LauncherError("--world_info is missing: it lists the ranks to start; the deepspeed command passes it")
    hosts = list(decode_world_info(args.world_info).values())
    if not 0 <= args.node_rank < len(hosts):
        raise LauncherError(
            f"--node_rank {args.node_rank}: --world_info has {len(hosts)} host(s), counted from 0; "
            "give one of these numbers"
        )
    return hosts


def _world(args: argparse.Namespace, hosts: list[list[int | str]], port: int) -> LaunchWorld:
    per_host = tuple(len(slots) for slots in hosts)
    if args.placed_by is None:
        sizes, launcher, node, local = per_host, args.node_rank, args.node_rank, 0
    else:
        placed = find_placed(args.placed_by, os.environ)
        total = sum(per_host)
        if placed.world_size != total:
            raise LauncherError(
                f"{args.placed_by} started {placed.world_size} processes, but {total} were requested; do not "
                "change their number in --launcher_args"
            )
        node = next(index for index in range(len(hosts)) if placed.rank < sum(per_host[: index + 1]))
        local = placed.rank - sum(per_host[:node])
        if placed.local_rank not in (None, local):
            raise LauncherError(
                f"{args.placed_by} made rank {placed.rank} number {placed.local_rank} of its machine, where number "
                f"{local} was expected: ranks must fill one machine after the other; leave mapping options out of "
                "--launcher_args"
            )
        sizes, launcher = (1,) * total, placed.rank
    return LaunchWorld(
        sizes=sizes,
        launcher=launcher,
        first_local_rank=local,
        local_size=per_host[node],
        node_rank=node,
        num_nodes=len(hosts),
        master_addr=args.master_addr,
        master_port=port,
        run_id=args.run_id,
    )


def _common_environment(
    world: LaunchWorld, on_cpu: bool, bound_cores: int | None, *, has_log_files: bool
) -> dict[str, str]:
    """Returns the variables common to all ranks of this machine; ``bound_cores`` is per rank."""
    name = environment_file_name()
    environment = dict(os.environ)
    # Variables set for this run take precedence over those in a file.
    added = {key: value for key, value in read_environment_files(name).items() if key not in environment}
    if added:
        logger.info(f"set from {name}: {', '.join(added)}")
    environment.update(added)
    if bound_cores is not None:
        environment.update(threads_per_rank(environment, bound_cores, 1))
    elif on_cpu:
        environment.update(threads_per_rank(environment, usable_cores(), world.local_size))
    label = len(f"[rank {world.world_size - 1}] ") if world.world_size > 1 else 0
    # The lines of a rank go through a pipe, but to a terminal.
    form = {FORMAT_VARIABLE: TERMINAL} if os.isatty(2) and not has_log_files else {}
    return {**screen_width(label), **form, **environment}


def _command(args: argparse.Namespace, local_rank: int) -> tuple[str, ...]:
    place = () if args.no_local_rank else (f"--local_rank={local_rank}",)
    return (*interpreter(args), args.training_script, *place, *args.training_script_args)


def _log_files(folder: str | None, ranks: list[int]) -> list[Path] | None:
    if folder is None:
        return None
    started = time.strftime("%Y%m%d%H%M%S")
    files = [Path(folder) / f"{started}_rank{rank}.log" for rank in ranks]
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for file in files:
            file.touch()
    except OSError as error:
        raise LauncherError(
            f"--enable_each_rank_log {folder}: cannot be written ({error.strerror}); choose another folder"
        ) from error
    return files


@contextmanager
def _pid_file(is_on: bool) -> Iterator[None]:
    """With ``--save_pid``: writes a file with the number of this process, and removes it at the end."""
    if not is_on:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"{os.getpid()}.deepspeed"
    _write_new(path, str(os.getpid()))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _write_new(path: Path, text: str) -> None:
    """Writes a new file in a folder that other users may also write to, replacing an earlier file."""
    try:
        path.unlink(missing_ok=True)  # left by an earlier process with this id; removes a link, not its target
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LauncherError(
            f"--save_pid: cannot write {path} ({error.strerror}); remove that file, choose another folder by TMPDIR, "
            "or leave the option out"
        ) from error
    with os.fdopen(handle, "w") as file:
        file.write(text)


def elastic_nodes(min_nodes: int, max_nodes: int, nodes: int) -> tuple[int, int]:
    """Returns the least and greatest number of machines of an elastic run; an argument of -1 is not given.

    It waits for the least number, and admits no machines beyond the greatest.

    Raises:
        LauncherError: The numbers contradict each other.
    """
    least = 1 if min_nodes == -1 else min_nodes
    most = max(nodes, least) if max_nodes == -1 else max_nodes
    if not 1 <= least <= most:
        raise LauncherError(
            f"--min_elastic_nodes {least}, --max_elastic_nodes {most}: expected 1 <= minimum <= maximum; correct "
            "them, or leave them out for 1 up to all machines"
        )
    return least, most


def agent_command(
    nodes: tuple[int, int],
    local_size: int,
    address: str,
    port: int,
    run_id: str,
    script: Sequence[str],
    flags: Sequence[str] = (),
) -> tuple[str, ...]:
    """Returns the command of torch's elastic agent for one machine.

    Args:
        address: Address of the rendezvous: the first machine.
        run_id: Name of the run: agents of other runs are rejected.
        flags: ``--module`` or ``--no_python``.
    """
    spelled = {"--no_python": "--no-python"}
    # On one machine its own name need not be resolvable.
    local = ["--local-addr=127.0.0.1"] if address in ("127.0.0.1", "localhost") else []
    return (
        sys.executable, "-u", "-m", "torch.distributed.run",
        f"--nnodes={nodes[0]}:{nodes[1]}", f"--nproc-per-node={local_size}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}", f"--rdzv-id={run_id}",
        *local, f"--max-restarts={MAX_RESTARTS}", *(spelled.get(flag, flag) for flag in flags), *script,
    )  # fmt: skip


if __name__ == "__main__":
    main()
