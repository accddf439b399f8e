"""The ``deepspeed`` command: selects devices and machines, and starts their ranks.

``deepspeed [options] script.py [arguments]``. On one machine it becomes :mod:`.launch`; for several it builds the
commands of pdsh, ssh, MPI or Slurm (:mod:`.remote`) and runs them (:mod:`.front`); with ``--no_ssh`` it is called on
every machine and starts the ranks there.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from deepspeed.cli.command import run_command
from deepspeed.cluster import find_cluster_node
from deepspeed.launcher import launch
from deepspeed.launcher.devices import usable_cores
from deepspeed.launcher.environment import (
    SECRET,
    environment_file_name,
    new_run_id,
    new_secret,
    read_environment_files,
    threads_per_rank,
)
from deepspeed.launcher.forked import IMPORTS, SWITCH, fork_command
from deepspeed.launcher.ports import RequestedPort, claim_port
from deepspeed.launcher.remote import BUILDERS, LAUNCHER_PROGRAMS, Command, RemoteRun, is_variable
from deepspeed.launcher.resources import (
    DLTS_HOSTFILE,
    LauncherError,
    encode_world_info,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
)
from deepspeed.launcher.screen import open_standard_streams
from deepspeed.launcher.selection import RankSelection, processor_options, select_slots
from deepspeed.logging import logger, set_log_level_from_string
from deepspeed.ports import DEFAULT_PORT
from deepspeed.release import VERSION, info_line

if TYPE_CHECKING:
    from deepspeed.launcher.handshake import LauncherInfo

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DLTS_HOSTFILE",
    "EXPORT_ENVS",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_resource_filter",
]

EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
DEEPSPEED_ENVIRONMENT_NAME = environment_file_name()

# This package's variables, besides those of EXPORT_ENVS and of the accelerator.
_OWN_VARIABLES = ("DS_", "DEEPSPEED_")
_NOT_FOR_OTHERS = ("DS_ENV_FILE", "DS_RUN_ID", SECRET)
_SOUNDS_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY|ACCESS_KEY", re.IGNORECASE)
# Options that only concern other machines.
_FOR_OTHER_MACHINES = ("launcher_args", "no_ssh_check", "ssh_port", "venv_script")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; options must precede the script. Without any it shows the help and ends."""
    parser = _parser()
    if not (sys.argv[1:] if args is None else args):
        parser.parse_args(["--help"])
    found = parser.parse_args(args)
    found.start_options = _start_options(found, parser)
    _set_node_numbers(found)
    return found


def _start_options(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    options = []
    for action in parser._actions:
        if not action.option_strings or action.dest in ("autotuning", "dry_run", "help", "version"):
            continue
        value = getattr(args, action.dest)
        if value is None or value == action.default:
            continue
        name = next(option for option in action.option_strings if option.startswith("--"))
        if action.dest == "num_nodes":
            value = value[1] if value[0] == -1 else f"{value[0]}:{value[1]}"
        options.append(name if action.nargs == 0 else f"{name}={value}")
    return options


def _node_range(text: str) -> tuple[int, int]:
    """Reads ``N`` or ``MIN:MAX``; the minimum of a single number is -1."""
    least, colon, most = text.rpartition(":")
    return (int(least) if colon else -1, int(most))


def _set_node_numbers(args: argparse.Namespace) -> None:
    least, args.num_nodes = args.num_nodes
    if least == -1:
        return
    if max(args.min_elastic_nodes, args.max_elastic_nodes) != -1:
        raise LauncherError(
            f"--num_nodes {least}:{args.num_nodes} and --min_elastic_nodes/--max_elastic_nodes set the same; use one "
            "of them"
        )
    args.min_elastic_nodes, args.max_elastic_nodes = least, args.num_nodes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # the text of --version is one line
        description="Starts one rank of a training script per device, on this machine or\non those of a host file.",
        epilog="Everything after the script's name goes to the script.",
    )
    parser.add_argument(
        "--version", action="version", version=info_line(), help="print version, commit and path of this package"
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "-H",
        "--hostfile",
        default=DLTS_HOSTFILE,
        help="file with lines 'host slots=N' or 'host'; without it: this machine",
    )
    where.add_argument("-i", "--include", default="", help="use only these hosts and slots: host[:slot,...]@host...")
    where.add_argument("-e", "--exclude", default="", help="do not use these hosts and slots: host[:slot,...]@host...")
    where.add_argument(
        "--num_nodes",
        type=_node_range,
        default=(-1, -1),
        metavar="N",
        help="use the first N hosts; with --elastic_training also MIN:MAX",
    )
    where.add_argument(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        default=-1,
        help="use the first N devices of each machine, with one rank each",
    )
    where.add_argument("--master_addr", default="", help="address of rank 0 (default 127.0.0.1)")
    where.add_argument(
        "--master_port",
        type=int,
        default=None,
        help=f"port of rank 0 (default MASTER_PORT, or {DEFAULT_PORT}; a free one if that is in use)",
    )
    launch.add_rank_options(parser)
    others = parser.add_argument_group("several machines")
    others.add_argument(
        "--launcher", default="pdsh", type=str.lower, choices=tuple(BUILDERS), help="program that starts the ranks"
    )
    others.add_argument("--launcher_args", default="", help="further arguments of that program, as one quoted string")
    others.add_argument("--no_ssh", action="store_true", help="start only this machine's ranks (needs --node_rank)")
    others.add_argument("--node_rank", type=int, default=-1, help="index of this machine, with --no_ssh")
    others.add_argument("--no_ssh_check", action="store_true", help="do not try to log in before starting")
    others.add_argument("--ssh_port", type=int, default=None, help="port of the SSH servers")
    others.add_argument("--venv_script", default=None, help="shell script to source on each machine (pdsh, ssh)")
    others.add_argument("--force_multi", action="store_true", help="use --launcher for a single machine too")
    elastic = parser.add_argument_group("elastic runs")
    elastic.add_argument("--elastic_training", action="store_true", help="let torch's elastic agent restart ranks")
    parser.add_argument("--dry_run", action="store_true", help="print what would be run, without running it")
    parser.add_argument(
        "--autotuning",
        default="",
        choices=("", "tune", "run"),
        help="search for the fastest configuration of the script; run: then train with it",
    )
    parser.add_argument("user_script", help="the script, module or program to run on each rank")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command; exits with the code of the rank that failed first."""
    run_command("deepspeed", lambda: _run(parse_args(args)), args, keeps_output=True)


def _run(args: argparse.Namespace) -> int:
    open_standard_streams()  # before any socket
    set_log_level_from_string("error" if args.quiet else args.log_level)
    _take_place_in_cluster(args)
    _check_options(args)
    selected = select_slots(args, os.environ)
    if args.autotuning:
        return _tune(args, selected)
    if args.no_ssh or not (args.force_multi or selected.needs_launcher):
        return _run_here(args, selected)
    return _run_on_machines(args, selected)


def _tune(args: argparse.Namespace, selected: RankSelection) -> int:
    from deepspeed.autotuning import Autotuner

    args.fork_command = _fork_command if _imports_once(args, selected) else None
    tuner = Autotuner(args, selected.hosts)
    tuner.tune()
    tuner.print_tuning_results()
    tuner.write_optimal_config()
    return tuner.run_after_tuning() if args.autotuning == "run" else 0


def _imports_once(args: argparse.Namespace, selected: RankSelection) -> bool:
    """Imports torch and this package for all starts of the script; returns whether the starts can be forks."""
    binds = args.bind_cores_to_rank or args.bind_core_list
    if binds or args.module or args.no_python or selected.needs_launcher or args.force_multi:
        return False
    if os.environ.get(SWITCH) == "0" or "torch" in sys.modules:  # torch was imported to find devices
        return False
    environment = {**read_environment_files(environment_file_name()), **os.environ}
    ranks = len(next(iter(selected.hosts.values())))
    return IMPORTS.load({**environment, **threads_per_rank(environment, usable_cores(), ranks)})


def _fork_command(program: Sequence[str], environment: Mapping[str, str], output: tuple[int, int]) -> int:

    def run() -> None:
        sys.argv = ["deepspeed", *program[3:]]
        main()

    return fork_command(run, environment, output)


def _take_place_in_cluster(args: argparse.Namespace) -> None:
    """Starts only this machine's ranks where a cluster has started the command on each of several machines.

    A host file or an option that selects machines takes precedence over the cluster's variables.
    """
    chooses_hosts = args.no_ssh or args.force_multi or args.include or args.exclude or args.num_nodes != -1
    if chooses_hosts or args.launcher != "pdsh" or os.path.isfile(args.hostfile):
        return
    node = find_cluster_node(os.environ)
    if node is None:
        return
    args.no_ssh, args.node_rank, args.num_nodes = True, node.index, node.count
    args.master_addr = args.master_addr or node.address
    args.master_port = args.master_port or node.port
    if args.num_gpus == -1 and node.devices is not None:
        args.num_gpus = node.devices
    logger.info(f"machine {node.index} of {node.count}, found by {node.source}; rank 0 is on {args.master_addr}")


def _check_options(args: argparse.Namespace) -> None:
    if args.autotuning and (args.no_ssh or args.elastic_training or args.dry_run):
        raise LauncherError(
            f"--autotuning {args.autotuning}: does not go with --no_ssh, --elastic_training or --dry_run, as one "
            "command starts the script several times on ranks that stay the same; leave that option out"
        )
    if args.no_ssh and args.node_rank < 0:
        raise LauncherError(
            f"--no_ssh: --node_rank {args.node_rank} does not identify this machine; give --node_rank 0 on the "
            "first, 1 on the second, and so on"
        )
    if args.no_ssh and args.force_multi:
        raise LauncherError("--no_ssh and --force_multi exclude each other: one of them uses a launcher; choose")


# --- this machine -----------------------------------------------------------------------------------------------------


def _run_here(args: argparse.Namespace, selected: RankSelection) -> int:
    if not args.no_ssh:
        unused = [f"--{name}" for name in _FOR_OTHER_MACHINES if getattr(args, name)]
        if unused:
            logger.warning(f"{', '.join(unused)}: without effect, all ranks run on this machine")
        if args.launcher != "pdsh":
            logger.info(
                f"--launcher {args.launcher}: not needed, all ranks run on this machine (--force_multi uses it)"
            )
    if args.no_ssh and args.node_rank >= len(selected.hosts):
        raise LauncherError(
            f"--node_rank {args.node_rank}: {len(selected.hosts)} machine(s) are known, counted from 0; name all of "
            "them in a host file, or give their number with --num_nodes"
        )
    command = _launch_arguments(args, selected)
    if args.dry_run:
        _show([Command((sys.executable, "-u", "-m", "deepspeed.launcher.launch", *command))])
        return 0
    launch.main(command)
    return 0


def _launch_arguments(args: argparse.Namespace, selected: RankSelection) -> list[str]:
    hosts = selected.hosts
    address = args.master_addr or (next(iter(hosts)) if len(hosts) > 1 else "127.0.0.1")
    command = [f"--world_info={encode_world_info(hosts)}", f"--master_addr={address}"]
    if args.master_port is not None:
        command.append(f"--master_port={args.master_port}")
    if args.no_ssh:
        command.append(f"--node_rank={args.node_rank}")
    return [*command, *rank_options(args), args.user_script, *args.user_args]


def rank_options(args: argparse.Namespace) -> list[str]:
    """Returns the options for starting a rank, as arguments of :mod:`deepspeed.launcher.launch`.

    Raises:
        LauncherError: Numbers of elastic nodes are given without ``--elastic_training``.
    """
    switches = ("module", "no_python", "no_local_rank", "save_pid", "quiet", "bind_cores_to_rank")
    options = [f"--{name}" for name in switches if getattr(args, name)]
    for name in ("enable_each_rank_log", "bind_core_list"):
        if getattr(args, name):
            options.append(f"--{name}={getattr(args, name)}")
    if args.grace is not None:
        options.append(f"--grace={args.grace}")
    if args.signal is not None:
        options.append(f"--signal={args.signal}")
    if args.elastic_training:
        options.append("--enable_elastic_training")
        options += [f"--{n}={getattr(args, n)}" for n in ("min_elastic_nodes", "max_elastic_nodes")]
    elif max(args.min_elastic_nodes, args.max_elastic_nodes) != -1:
        raise LauncherError("--min_elastic_nodes and --max_elastic_nodes need --elastic_training; add it")
    return [*options, f"--log_level={args.log_level}"]


# --- several machines -------------------------------------------------------------------------------------------------


def _run_on_machines(args: argparse.Namespace, selected: RankSelection) -> int:
    from deepspeed.launcher import front

    hosts = selected.hosts
    if not args.dry_run:
        front.require_program(LAUNCHER_PROGRAMS[args.launcher], args.launcher)
        if args.launcher in ("pdsh", "ssh") and not args.no_ssh_check:
            front.check_reachable(list(hosts), _ssh_options(args))
    address = args.master_addr or _find_address(args, list(hosts))
    launcher_args = tuple(shlex.split(args.launcher_args))
    if args.launcher == "slurm":
        launcher_args = (*processor_options(os.environ, len(next(iter(hosts.values())))), *launcher_args)
    with claim_port(address, RequestedPort.of(args.master_port), is_shared=len(hosts) > 1) as claim:
        run = RemoteRun(
            hosts=hosts,
            master_addr=address,
            master_port=claim.port,
            exports=_exports(),
            folder=os.getcwd(),
            options=tuple(rank_options(args)),
            script=(args.user_script, *args.user_args),
            run_id=new_run_id(),
            secret=new_secret(),
            launcher_args=launcher_args,
            ssh_port=args.ssh_port,
            venv_script=args.venv_script,
        )
        secrets = [name for name in run.exports if _SOUNDS_SECRET.search(name)]
        if args.launcher == "pdsh" and secrets:
            logger.warning(
                f"--launcher pdsh: the values of {', '.join(secrets)} are in the command lines of pdsh and ssh "
                "on this machine while the run lasts, where its other users can read them; --launcher ssh "
                "hides them"
            )
        commands = BUILDERS[args.launcher](run)
        if args.dry_run:
            _show(commands)
            return 0
        for line in rank_map(hosts):
            logger.info(line)
        stop_signal = None if args.signal is None else signal.Signals[args.signal]
        return front.run_commands(commands, args.grace, stop_signal, _launchers(args, run))


def _launchers(args: argparse.Namespace, run: RemoteRun) -> tuple[LauncherInfo, str] | None:
    """Returns this process's identity towards the launchers, and the hub's address.

    None if it must not send signals.
    """
    from deepspeed.launcher.handshake import FRONT, LauncherInfo

    if args.launcher not in ("pdsh", "ssh") or len(run.hosts) == 1 or args.elastic_training:
        return None  # the program forwards signals, or the launchers are not connected
    sizes = tuple(len(slots) for slots in run.hosts.values())
    host = socket.gethostname()
    return LauncherInfo(FRONT, host, sizes, run.master_port, VERSION, run.run_id, run.secret), run.master_addr


def _find_address(args: argparse.Namespace, hosts: list[str]) -> str:
    from deepspeed.launcher import front

    if args.launcher == "slurm":
        return ""  # srun orders the machines; its tasks read which is the first
    if hosts[0] in ("localhost", "127.0.0.1"):
        if len(hosts) > 1:
            raise LauncherError(
                f"the first of {len(hosts)} hosts is {hosts[0]!r}, which every machine resolves to itself; "
                "write its real name into the host file, or give --master_addr"
            )
        return "127.0.0.1"
    if args.dry_run:
        logger.info(
            f"--dry_run: the address of {hosts[0]} is not queried (ssh {hosts[0]} hostname -I); "
            "its name is used instead"
        )
        return hosts[0]
    return front.query_address(hosts[0], _ssh_options(args))


def _ssh_options(args: argparse.Namespace) -> list[str]:
    """Returns the options of the logins before the run: the port, and under ``--launcher ssh`` those of the run too."""
    port = ["-p", str(args.ssh_port)] if args.ssh_port is not None else []
    return [*port, *(shlex.split(args.launcher_args) if args.launcher == "ssh" else [])]


def rank_map(hosts: Mapping[str, Sequence[int | str]]) -> list[str]:
    """Returns which ranks run where, one line per machine after a heading."""
    total = sum(len(slots) for slots in hosts.values())
    lines = [f"rank map: {total} rank(s) on {len(hosts)} machine(s)"]
    first = 0
    for index, (host, slots) in enumerate(hosts.items()):
        last = first + len(slots) - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        lines.append(f"  node {index}, {host}: {ranks} on slots {', '.join(map(str, slots))}")
        first = last + 1
    return lines


def _exports() -> dict[str, str]:
    """Returns the variables that ranks on other machines must have with the same values as here."""
    prefixes = (*EXPORT_ENVS, *_accelerator_exports(), *_OWN_VARIABLES)
    found = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(prefixes) and name not in _NOT_FOR_OTHERS and is_variable(name)
    }
    for name, value in read_environment_files(environment_file_name()).items():
        if is_variable(name):
            found[name] = os.environ.get(name, value)  # variables set for this run take precedence over a file
    return found


def _accelerator_exports() -> list[str]:
    """Returns the prefixes that the accelerator's communication library reads.

    NCCL's if the devices cannot be inspected here.
    """
    if "torch" not in sys.modules:
        return ["NCCL"]
    from deepspeed.accelerator import get_accelerator

    return sorted({"NCCL", *get_accelerator().export_envs()})


def _show(commands: Sequence[Command]) -> None:
    for command in commands:
        sys.stdout.write(f"{command}\n")


if __name__ == "__main__":
    main()
