"""Hosts and their device slots: the host file, ``--include`` and ``--exclude``, and the encoding of a selection."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deepspeed.errors import DeepSpeedConfigError

Slots = Mapping[str, int]
Selection = dict[str, list[int]]

DLTS_HOSTFILE = "/job/hostfile"
"""The host file used without ``--hostfile``; upstream's name."""

# Excludes options of ssh or pdsh ("-" first) and characters that are special in a shell or a list of hosts.
_HOST_NAME = re.compile(r"[A-Za-z0-9_][\w.:@-]*", re.ASCII)
_HOST_LINE = re.compile(r"(?P<host>[^\s=]+)(\s+slots=(?P<slots>\d+)(\s+max[_-]slots=(?P<most>\d+))?)?")
_MPICH_HOST = re.compile(r"(?P<host>[^\s=:]+):(?P<slots>\d+)")


class LauncherError(DeepSpeedConfigError):
    """Raised when a command line cannot be carried out."""


def check_host_name(host: str, source: str) -> None:
    """Raises unless ``host`` is safe as the name of a machine for programs such as ssh.

    Raises:
        LauncherError: The name has other characters, or begins like an option.
    """
    if not _HOST_NAME.fullmatch(host):
        raise LauncherError(
            f"{source}: expected the name of a machine (letters, digits and . _ - : @, not beginning with -), found "
            f"{host!r}; correct it"
        )


def fetch_hostfile(hostfile_path: str | None, devices: Callable[[], int] = lambda: 1) -> OrderedDict[str, int] | None:
    """Reads ``host slots=N`` lines, with Open MPI's ``max_slots`` too, or a plain list of hosts (``$PBS_NODEFILE``).

    Args:
        hostfile_path: The file; blank lines and those that start with ``#`` are ignored.
        devices: Queries the slots of hosts that are named without slots, once each. Where a plain list names hosts
            repeatedly, as schedulers do, a host has as many slots as lines.

    Returns:
        Slots per host in the order of the file; None if there is no such file (the text ``None`` included).

    Raises:
        LauncherError: A line is malformed, a host with slots comes twice, or there is no host at all.
    """
    if hostfile_path is None or not Path(hostfile_path).is_file():
        return None
    hosts: OrderedDict[str, int] = OrderedDict()
    named: Counter[str] = Counter()  # without slots
    for number, raw in enumerate(_lines(hostfile_path), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        match = _HOST_LINE.fullmatch(line)
        if match is None:
            raise LauncherError(f"{hostfile_path}, line {number}: expected 'host slots=N' or 'host', found {line!r}")
        host, slots = match["host"], match["slots"]
        if mpich := _MPICH_HOST.fullmatch(host):
            raise LauncherError(
                f"{hostfile_path}, line {number}: expected 'host slots=N' or 'host', found {line!r}; write "
                f"'{mpich['host']} slots={mpich['slots']}'"
            )
        if match["most"] is not None and int(match["most"]) < int(slots):
            raise LauncherError(
                f"{hostfile_path}, line {number}: expected slots up to max_slots, found {line!r}; correct one of them"
            )
        check_host_name(host, f"{hostfile_path}, line {number}")
        if host in hosts and (slots is not None or host not in named):
            raise LauncherError(f"{hostfile_path}, line {number}: host {host!r} comes a second time; keep one line")
        if slots is None:
            named[host] += 1
        hosts[host] = named[host] if slots is None else int(slots)
    if not hosts:
        raise LauncherError(f"{hostfile_path}: no host in the file; write lines 'host slots=N' or remove the file")
    if named and max(named.values()) == 1:
        hosts.update(dict.fromkeys(named, devices()))
    return hosts


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise LauncherError(f"{path}: cannot be read ({error.strerror}); correct the permissions") from error


def parse_inclusion_exclusion(resource_pool: Slots, inclusion: str, exclusion: str) -> Selection:
    """Applies ``--include`` or ``--exclude`` to hosts with slot counts; see :func:`parse_resource_filter`."""
    available = {host: list(range(slots)) for host, slots in resource_pool.items()}
    return parse_resource_filter(available, include_str=inclusion, exclude_str=exclusion)


def parse_resource_filter(
    host_info: Mapping[str, list[int]], include_str: str = "", exclude_str: str = ""
) -> Selection:
    """Selects slots.

    Args:
        include_str: ``host[:slot,...]@host...`` to use; a host without slots means all of its slots.
        exclude_str: The same, to leave out.

    Returns:
        The selected slots per host, in the order of ``host_info``; with a filter, hosts without a slot are left out.

    Raises:
        LauncherError: Both strings are given, or one names an unknown host or slot.
    """
    if include_str and exclude_str:
        raise LauncherError("--include and --exclude exclude each other; use one of them")
    if not include_str and not exclude_str:
        return {host: list(slots) for host, slots in host_info.items()}
    option = "--include" if include_str else "--exclude"
    named = _parse_filter(option, include_str or exclude_str, host_info)
    selected = {}
    for host, slots in host_info.items():
        chosen = named.get(host, set())
        if remaining := [slot for slot in slots if (slot in chosen) == bool(include_str)]:
            selected[host] = remaining
    return selected


def _parse_filter(option: str, text: str, host_info: Mapping[str, list[int]]) -> dict[str, set[int]]:
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, numbers = (item.strip() for item in part.partition(":"))
        if host not in host_info:
            raise LauncherError(f"{option} {text}: host {host!r} is unknown; name one of {', '.join(host_info)}")
        slots = set(host_info[host])
        if colon:
            items = [item.strip() for item in numbers.split(",")]
            if not all(item.isdecimal() for item in items):
                raise LauncherError(
                    f"{option} {text}: expected slot numbers like {host}:0,2, found {part!r}; correct it"
                )
            numbered = {int(item) for item in items}
            if missing := sorted(numbered - slots):
                raise LauncherError(
                    f"{option} {text}: host {host!r} has no slots {missing}; choose from {sorted(slots)}"
                )
            slots = numbered
        named[host] = named.get(host, set()) | slots
    return named


def encode_world_info(world_info: Mapping[str, Sequence[int | str]]) -> str:
    """Packs ``{host: [slots]}`` into URL-safe base64."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def decode_world_info(text: str) -> dict[str, list[int | str]]:
    """Unpacks :func:`encode_world_info`. Raises LauncherError: the text is not what it produces."""
    try:
        world = json.loads(base64.urlsafe_b64decode(text))
    except (binascii.Error, ValueError) as error:
        raise LauncherError(f"--world_info={text}: expected URL-safe base64 of JSON like {{'host': [0, 1]}}") from error
    if (
        not isinstance(world, dict)
        or not world
        or not all(isinstance(slots, list) and slots for slots in world.values())
    ):
        raise LauncherError(f"--world_info: expected hosts with lists of devices, found {world!r}")
    return world
