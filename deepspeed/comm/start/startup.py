"""What the ranks exchange before they start: their machines and devices, and whether configuration and model match.

Everything goes through the rendezvous store, because a collective between mismatched ranks would hang. Each
rank posts its data; rank 0 compares and posts a verdict, which all ranks read. Late ranks are waited for;
a mismatched rank is named on every rank. ``admission`` has decided before which processes are ranks of the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from deepspeed.comm.base.batched_store import read_many
from deepspeed.comm.base.environment import run_of_adopted
from deepspeed.comm.watch.processes import this_process
from deepspeed.errors import CommunicationError, DeepSpeedConfigError, DivergenceError
from deepspeed.ports import address_towards, first_address
from deepspeed.release import VERSION

_SCOPE = "deepspeed/start"
# How long rank 0 waits for every rank to read a bad verdict: the store may end with rank 0.
_READ_SECONDS = 5.0
_MOST_NAMED = 8
_MIXED_RUNS = "the processes of one group belong to different runs"


@dataclass(frozen=True)
class RankInfo:
    """Facts about one rank, which it posts itself."""

    host: str  # its machine
    pid: int  # its process
    local_rank: int  # its rank on the machine
    device: str  # kind of its accelerator
    device_count: int  # devices it sees
    version: str  # the version of this package
    backend: str  # backend and device of the group
    address: str = ""  # its machine's address as rank 0's machine sees it; empty if there is no route
    # first address that its host name resolves to, where gloo listens; empty for an unknown name
    named_address: str = ""
    process: str = ""  # its process, as :func:`~deepspeed.comm.watch.processes.this_process` names it; empty if unknown


def own_facts(local_rank: int, backend: str, rendezvous_host: str | None = None) -> RankInfo:
    """Returns the facts of this process; ``rendezvous_host`` is rank 0's machine, None if the rendezvous is a file."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return RankInfo(
        host=socket.gethostname(),
        pid=os.getpid(),
        local_rank=local_rank,
        device=accelerator.device_name(),
        device_count=accelerator.device_count(),
        version=VERSION,
        backend=backend,
        address=(address_towards(rendezvous_host) if rendezvous_host else None) or "",
        named_address=first_address(socket.gethostname()) or "",
        process=this_process(),
    )


def compare_facts(facts: Sequence[RankInfo]) -> str | None:
    """Returns a message with what does not match and on which ranks; None if everything matches."""
    for name, what, remedy in (
        ("version", "version of deepspeed", "install the same version on all machines"),
        ("device", "accelerator", "check the drivers and DS_ACCELERATOR on these machines"),
        ("backend", "backend", "give init_distributed the same dist_backend everywhere"),
    ):
        values = [str(getattr(fact, name)) for fact in facts]
        if len(set(values)) > 1:
            return _sentence(f"the {what}", values, facts, remedy)
    ranks_on = Counter(fact.host for fact in facts)
    has_rank_per_device = all(fact.device_count == ranks_on[fact.host] for fact in facts)
    if len({fact.device_count for fact in facts}) == 1 or has_rank_per_device:
        return None
    values = [str(fact.device_count) for fact in facts]
    return _sentence(
        "the number of visible devices",
        values,
        facts,
        "check the drivers and the visible-device variables there, or start one rank per device on each machine",
    )


def _sentence(what: str, values: Sequence[str], facts: Sequence[RankInfo], remedy: str) -> str:
    """Names the ranks whose value is not that of the majority (of rank 0 where there is none)."""
    common = max(values, key=lambda value: (values.count(value), value == values[0]))
    others = [
        f"rank {rank} (host {facts[rank].host}) has {value}" for rank, value in enumerate(values) if value != common
    ]
    return (
        f"{what} differs between the ranks: {_listed(others)}; the other {values.count(common)} rank(s) have {common}. "
        f"All must be the same: {remedy}"
    )


def _listed(parts: Sequence[str]) -> str:
    more = f"; and {len(parts) - _MOST_NAMED} more" if len(parts) > _MOST_NAMED else ""
    return "; ".join(parts[:_MOST_NAMED]) + more


def rank_map(facts: Sequence[RankInfo]) -> list[str]:
    """Returns a table of the ranks: one line per machine after a heading."""
    hosts: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        hosts.setdefault(fact.host, []).append(rank)
    lines = [f"rank map: {len(facts)} rank(s) on {len(hosts)} host(s), {facts[0].device}, backend {facts[0].backend}"]
    for host, ranks in hosts.items():
        places = ", ".join(f"{rank} (local {facts[rank].local_rank}, pid {facts[rank].pid})" for rank in ranks)
        lines.append(f"  {host}: rank {places}")
    return lines


def agree_on_config(
    store: Any, topic: str, rank: int, world_size: int, config: Mapping[str, Any] | Exception, timeout: timedelta
) -> None:
    """Compares the configuration of all ranks of a group, which share ``store``. All of them must call it.

    ``topic`` names the group, the same on all; ``config`` is the value per dotted key, or why this rank could not read
    its configuration.

    Raises:
        CommunicationError: A rank belongs to another run.
        DeepSpeedConfigError: A rank has another configuration, or could not read its own.
    """
    mine: dict[str, Any] = {"place": _own_place(rank), "run": run_of_adopted(os.environ)}
    if isinstance(config, Exception):
        mine["error"] = str(config)
    else:
        # Of objects the class is compared: their ``repr`` may contain an address.
        mine["values"] = json.dumps(config, sort_keys=True, default=lambda value: type(value).__name__)
    _, decision = _exchange(store, f"config/{topic}", rank, world_size, json.dumps(mine), _compare_configs, timeout)
    if decision is not None and decision.startswith(_MIXED_RUNS):
        raise CommunicationError(decision)
    if isinstance(config, Exception):
        raise config
    if decision is not None:
        raise DeepSpeedConfigError(decision)


def _compare_configs(posts: list[str]) -> str | None:
    ranks = [json.loads(post) for post in posts]
    if len({each["run"] for each in ranks} - {""}) > 1:
        places = [f"{each['place']} belongs to {each['run'] or 'a run without a name'}" for each in ranks]
        return (
            f"{_MIXED_RUNS}: {_listed(places)}. Two runs connected at one port before this package was called: "
            "give each its own (MASTER_PORT), or call deepspeed.init_distributed instead of torch's "
            "init_process_group"
        )
    failed = [f"{each['place']}: {each['error']}" for each in ranks if "error" in each]
    if failed:
        return f"the configuration cannot be used on every rank: {_listed(failed)}"
    counts = Counter(each["values"] for each in ranks)
    if len(counts) == 1:
        return None
    common = max(counts, key=lambda text: (counts[text], text == ranks[0]["values"]))
    others = [
        f"{each['place']} has {_differences(json.loads(each['values']), json.loads(common))}"
        for each in ranks
        if each["values"] != common
    ]
    return (
        f"the configuration differs between the ranks: {_listed(others)}. All ranks must be given the same one: check "
        "that every machine reads the same file, and that no key depends on the rank"
    )


def _differences(values: Mapping[str, Any], common: Mapping[str, Any]) -> str:
    pairs = {key: (_shown(values, key), _shown(common, key)) for key in sorted({*values, *common})}
    return _listed([f"{key} {mine} instead of {theirs}" for key, (mine, theirs) in pairs.items() if mine != theirs])


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], sort_keys=True) if key in values else "(not set)"


def agree_on_model(
    store: Any, topic: str, rank: int, world_size: int, description: Sequence[str], timeout: timedelta
) -> None:
    """Compares the models of all ranks. All of them must call it.

    Ranks post digests; only if these differ, two ranks post their descriptions. Arguments are as of
    :func:`agree_on_config` and ``check_same_model``.

    Raises:
        DivergenceError: A rank has another model; the same on every rank.
    """
    text = "\n".join(description)
    mine = {"place": _own_place(rank), "digest": hashlib.sha256(text.encode()).hexdigest()}
    _, decision = _exchange(store, f"model/{topic}", rank, world_size, json.dumps(mine), _compare_models, timeout)
    if decision is None:
        return
    common, odd = json.loads(decision)
    scope = f"{_SCOPE}/model/{topic}/lines"
    if mine["digest"] in (common["digest"], odd["digest"]):
        store.set(f"{scope}/{mine['digest']}", text)  # equal from every rank with this digest
    keys = [f"{scope}/{each['digest']}" for each in (common, odd)]
    store.wait(keys, timeout)
    usual, other = ([*store.get(key).decode().splitlines()] for key in keys)
    store.add(f"{scope}/read", 1)
    if rank == 0:
        wait_for_readers(store, f"{scope}/read", world_size)
    raise DivergenceError(
        f"the model differs between the ranks: {odd['place']} has {_first_difference(other, usual)}, {common['place']} "
        f"has {_first_difference(usual, other)}. Build the same model on every rank, and freeze the same parameters"
    )


def _own_place(rank: int) -> str:
    return f"rank {os.environ.get('RANK', rank)} (host {socket.gethostname()})"


def _compare_models(posts: list[str]) -> str | None:
    """Returns a rank of the majority and one that has another model, as JSON; None if there is none."""
    ranks = [json.loads(post) for post in posts]
    digests = [each["digest"] for each in ranks]
    common = ranks[digests.index(max(digests, key=lambda each: (digests.count(each), each == digests[0])))]
    odd = next((each for each in ranks if each["digest"] != common["digest"]), None)
    return None if odd is None else json.dumps([common, odd])


def _first_difference(lines: Sequence[str], others: Sequence[str]) -> str:
    """Returns the first line that differs from ``others``."""
    place = next((i for i, pair in enumerate(zip(lines, others, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        place = min(len(lines), len(others))
    if place < len(lines):
        return lines[place]
    return f"nothing after {lines[-1].partition(':')[0] if lines else 'the start'}"


def _exchange(
    store: Any,
    topic: str,
    rank: int,
    world_size: int,
    mine: str,
    judge: Callable[[list[str]], str | None],
    timeout: timedelta,
) -> tuple[list[str], str | None]:
    """Posts ``mine``; rank 0 judges all posts. Returns (the posts, on rank 0 only; the verdict, None if it is good)."""
    # Counted per rank in the store itself, so that a second group or engine uses other keys.
    round_number = store.add(f"{_SCOPE}/{topic}/rounds/{rank}", 1)
    scope = f"{_SCOPE}/{topic}/{round_number}"
    posts: list[str] = []
    store.set(f"{scope}/{rank}", mine)
    if store.add(f"{scope}/count", 1) == world_size:
        store.set(f"{scope}/all", "")
    if rank == 0:
        store.wait([f"{scope}/all"], timeout)
        posts = [post.decode() for post in read_many(store, [f"{scope}/{other}" for other in range(world_size)])]
        decision = judge(posts)
        store.set(f"{scope}/verdict", json.dumps(decision))
        if decision is not None:
            wait_for_readers(store, f"{scope}/read", world_size - 1)
        return posts, decision
    store.wait([f"{scope}/verdict"], timeout)
    decision = json.loads(store.get(f"{scope}/verdict"))
    if decision is not None:
        store.add(f"{scope}/read", 1)
    return posts, decision


def wait_for_readers(store: Any, key: str, count: int) -> None:
    """Waits until ``count`` ranks have incremented ``key``: the store may end with the process that waits here."""
    deadline = time.monotonic() + _READ_SECONDS
    while store.add(key, 0) < count and time.monotonic() < deadline:
        time.sleep(0.02)
