"""The ``deepspeed`` command: which devices of which machine, then their ranks.

``deepspeed [options] script.py [arguments]``. This release starts ranks on the machine it runs on.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence

from deepspeed.errors import DeepSpeedError, NotYetSupportedError
from deepspeed.launcher import launch
from deepspeed.launcher.devices import LocalDevices, find_devices, usable_cores
from deepspeed.launcher.ports import DEFAULT_PORT
from deepspeed.launcher.resources import (
    LauncherError,
    Slots,
    encode_world_info,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
)
from deepspeed.logging import logger, set_log_level_from_string

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

DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")

_THIS_MACHINE = "localhost"
_LATER = "comes with a later release"
# Options of known features that this release does not have: what to say when one is used.
_REFUSED = {
    "autotuning": "searching for a configuration",
    "force_multi": "starting ranks over ssh",
    "elastic_training": "elastic training",
    "min_elastic_nodes": "elastic training",
    "max_elastic_nodes": "elastic training",
}
# Options that only concern other machines.
_FOR_OTHER_MACHINES = ("launcher_args", "no_ssh", "no_ssh_check", "ssh_port", "venv_script")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; options must precede the script."""
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        allow_abbrev=False,
        description="Starts one rank of a training script per device of this machine.",
        epilog="Everything after the script's name goes to the script.",
    )
    where = parser.add_argument_group("where")
    where.add_argument("-H", "--hostfile", default=DLTS_HOSTFILE, help="lines 'host slots=N'; no file: this machine")
    where.add_argument("-i", "--include", default="", help="host[:slot,...]@host... to use")
    where.add_argument("-e", "--exclude", default="", help="host[:slot,...]@host... to leave out")
    where.add_argument("--num_nodes", type=int, default=-1, help="use the first N hosts")
    where.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks: the first N devices")
    where.add_argument("--master_addr", default="", help="where rank 0 is reached (default 127.0.0.1)")
    where.add_argument(
        "--master_port",
        type=int,
        default=None,
        help=f"its port (default {DEFAULT_PORT}, or a free one if that is taken)",
    )
    launch.add_rank_options(parser)
    others = parser.add_argument_group("other machines (without effect on this one)")
    others.add_argument("--launcher", default="pdsh", help="this release starts local ranks itself")
    others.add_argument("--launcher_args", default="", help="one quoted string")
    others.add_argument("--node_rank", type=int, default=-1)
    others.add_argument("--no_ssh", action="store_true")
    others.add_argument("--no_ssh_check", action="store_true")
    others.add_argument("--ssh_port", type=int, default=None)
    others.add_argument("--venv_script", default=None)
    parser.add_argument("--autotuning", default="", choices=("", "tune", "run"), help=argparse.SUPPRESS)
    parser.add_argument("--force_multi", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--elastic_training", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--min_elastic_nodes", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--max_elastic_nodes", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("user_script", help="the script, module or program to run on each rank")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command; exits with the code of the rank that failed first.

    Args:
        args: The command line; None means that of this process, and then a wrong one ends it with one sentence.

    Raises:
        DeepSpeedError: The command line cannot be carried out (only when ``args`` is given).
        SystemExit: A rank failed or the launcher was told to stop.
    """
    try:
        launch.main(_launch_arguments(parse_args(args)))
    except DeepSpeedError as error:
        if args is not None:
            raise
        sys.exit(f"deepspeed: {error}")


def _launch_arguments(args: argparse.Namespace) -> list[str]:
    """The command line of :mod:`deepspeed.launcher.launch` that does what ``args`` ask for."""
    set_log_level_from_string("error" if args.quiet else args.log_level)
    _refuse_later_features(args)
    world = {_THIS_MACHINE: _local_slots(args)}
    command = [f"--world_info={encode_world_info(world)}", f"--master_addr={args.master_addr or '127.0.0.1'}"]
    if args.master_port is not None:
        command.append(f"--master_port={args.master_port}")
    command += [
        f"--{name}" for name in ("module", "no_python", "no_local_rank", "save_pid", "quiet") if getattr(args, name)
    ]
    if args.enable_each_rank_log:
        command.append(f"--enable_each_rank_log={args.enable_each_rank_log}")
    return [*command, f"--log_level={args.log_level}", args.user_script, *args.user_args]


def _refuse_later_features(args: argparse.Namespace) -> None:
    for name, feature in _REFUSED.items():
        if getattr(args, name) not in ("", False, -1):
            raise NotYetSupportedError(f"--{name}: {feature} {_LATER}; leave the option out")
    launch.refuse_core_binding(args)
    if args.launcher.lower() != "pdsh":
        raise NotYetSupportedError(
            f"--launcher {args.launcher}: starting ranks on other machines {_LATER}; "
            "leave the option out to start them on this one"
        )
    unused = [f"--{name}" for name in _FOR_OTHER_MACHINES if getattr(args, name)]
    if unused:
        logger.warning(f"{', '.join(unused)}: without effect, all ranks run on this machine")


def _local_slots(args: argparse.Namespace) -> list[int | str]:
    """The devices of this machine that get a rank.

    Raises:
        LauncherError: What was asked for is not there or contradicts itself.
        NotYetSupportedError: It takes more than this machine.
    """
    _check_counts(args)
    filtered = bool(args.include or args.exclude)
    pool = fetch_hostfile(args.hostfile)
    devices = find_devices(os.environ, ignore_visible=filtered)
    if pool is not None:
        return _slots_of_hostfile(args, pool, devices)
    if args.num_nodes > 1:
        raise LauncherError(f"--num_nodes {args.num_nodes}: only this machine is known; {args.hostfile} does not exist")
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


def _check_counts(args: argparse.Namespace) -> None:
    if args.include and args.exclude:
        raise LauncherError("--include and --exclude exclude each other; use one of them")
    for name in ("num_gpus", "num_nodes"):
        count = getattr(args, name)
        if count != -1 and (args.include or args.exclude):
            raise LauncherError(f"--{name} and --include/--exclude exclude each other; use one of them")
        if count != -1 and count < 1:
            raise LauncherError(f"--{name} {count}: expected at least 1; leave the option out to use all")


def _cpu_slots(args: argparse.Namespace) -> list[int | str]:
    """As many ranks as were asked for: the processor takes any number."""
    if args.include or args.exclude:
        # Slots of a processor are only numbers: there are as many as one cares to name.
        named = [int(piece) for piece in args.include.partition(":")[2].split(",") if piece.strip().isdecimal()]
        pool = {_THIS_MACHINE: max(usable_cores(), *(number + 1 for number in named), 1)}
        chosen = parse_inclusion_exclusion(pool, args.include, args.exclude)
        return _nonempty(args, chosen.get(_THIS_MACHINE, []))
    if args.num_gpus == -1:
        logger.info("no accelerator device here: 1 rank on the CPU; --num_gpus N starts more")
        return [0]
    return list(range(args.num_gpus))


def _slots_of_hostfile(args: argparse.Namespace, pool: Slots, devices: LocalDevices) -> list[int | str]:
    """The slots of this machine in a host file that names no other one (after the selection)."""
    chosen = parse_inclusion_exclusion(pool, args.include, args.exclude)
    if args.num_nodes > len(chosen):
        raise LauncherError(f"--num_nodes {args.num_nodes}: {args.hostfile} has {len(chosen)} host(s)")
    if args.num_nodes != -1:
        chosen = dict(list(chosen.items())[: args.num_nodes])
    name = socket.gethostname()
    here = {_THIS_MACHINE, "127.0.0.1", name, name.partition(".")[0]}
    if len(chosen) > 1 or not here.issuperset(chosen):
        raise NotYetSupportedError(
            f"{args.hostfile} names {', '.join(chosen)}: ranks on other machines {_LATER}; "
            "--hostfile None starts them on this machine"
        )
    slots = [slot for host_slots in chosen.values() for slot in host_slots]
    _nonempty(args, slots)
    if args.num_gpus > len(slots):
        raise LauncherError(f"--num_gpus {args.num_gpus}: {args.hostfile} gives this machine {len(slots)} slot(s)")
    slots = slots if args.num_gpus == -1 else slots[: args.num_gpus]
    if not devices.is_cpu and max(slots) >= len(devices.ids):
        raise LauncherError(
            f"{args.hostfile} counts on device {max(slots)}, but this machine shows {len(devices.ids)} {devices.kind} "
            "device(s); correct its slots"
        )
    return list(slots) if devices.is_cpu else [devices.ids[slot] for slot in slots]


def _nonempty(args: argparse.Namespace, slots: Sequence[int]) -> list[int | str]:
    """The selected slots, which must be some."""
    if not slots:
        raise LauncherError(f"--exclude {args.exclude}: no device is left; leave one of them in")
    return list(slots)


if __name__ == "__main__":
    main()
