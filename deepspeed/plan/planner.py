"""From a request to a plan: which configuration on which machines, rehearsed, and what follows from it."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

from deepspeed.comm.axes import grid_mesh
from deepspeed.comm.mesh import Mesh, data_mesh
from deepspeed.config import parse
from deepspeed.config.batch import ACCUMULATION, MICRO, TOTAL
from deepspeed.config.sections.root import Root
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.offload.homes import placement_of
from deepspeed.plan.configs import changed, stage_of
from deepspeed.plan.models import BlockCheckpointing, Workload
from deepspeed.plan.rehearsal import Part, heaviest_rank, rehearse
from deepspeed.plan.result import Plan, Request


def make_plan(request: Request, *, compare: bool = True) -> Plan:
    """Plans one request.

    Args:
        request: What.
        compare: Also find the activations with the other setting of checkpointing, where blocks can be checkpointed.

    Raises:
        DeepSpeedConfigError: The configuration cannot run, or the model cannot be built; the engine's own sentence.
    """
    start = time.perf_counter()
    config, notices = _with_batch(request)
    ranks = request.machine.ranks
    parsed = parse(config, dp_world_size=ranks)
    notices += parsed.notices
    assert parsed.batch is not None
    section = config.get("optimizer")
    if not isinstance(section, dict) or section.get("type") is None:
        notices.append("the configuration names no optimizer; AdamW stands for the one that the script makes")
    rehearsed_config = config
    if (config.get("zero_optimization") or {}).get("mics_hierarchical_params_gather"):
        rehearsed_config = changed(config, mics_hierarchical_params_gather=None)
        notices.append(
            "gathers in two steps (mics_hierarchical_params_gather) are planned as gathers in one: they move as many "
            "bytes, fewer of them between nodes, and need room for one part of a bucket more"
        )
    mesh = mesh_of(parsed.root, ranks)
    part = Part(
        config=rehearsed_config,
        accumulation_steps=parsed.batch.accumulation_steps,
        micro_batch=parsed.batch.micro_batch_size,
        sequence_length=request.sequence_length,
        mesh=mesh,
        rank=min(1, ranks - 1) if request.rank is None else request.rank,
        kind=request.kind,
        autocast=parsed.root.torch_autocast.enabled,
    )
    named = parsed.root.optimizer.type if parsed.root.optimizer is not None else None
    if named == "Muon" and request.rank is None and ranks > 1 and stage_of(config) > 0:
        part = replace(part, rank=heaviest_rank(_workload(request), part))
        notices.append(f"Muon: rank {part.rank} is planned, which orthogonalises the largest matrix")
    made, other_setting = _workload(request), None
    if compare:
        try:
            checkpointing = BlockCheckpointing(made.model)
            other_setting = checkpointing.off if request.checkpointing else checkpointing.on
        except DeepSpeedConfigError as error:
            notices.append(str(error))
    found = rehearse(made, part, other_setting)
    activations = {request.checkpointing: found.activations}
    if found.other_activations is not None:
        activations[not request.checkpointing] = found.other_activations
    notices += found.notices
    return Plan(
        request=request,
        config=config,
        mesh=mesh,
        rank=part.rank,
        micro_batch=part.micro_batch,
        accumulation_steps=part.accumulation_steps,
        rehearsed=found,
        activations=activations,
        notices=notices,
        seconds=time.perf_counter() - start,
    )


def mesh_of(root: Root, ranks: int) -> Mesh:
    """The ranks of a job along the axes of its configuration."""
    placement = placement_of(root.zero_optimization, ranks)
    return data_mesh(ranks) if placement.shard_ranks in (None, ranks) else grid_mesh(ranks, placement.shard_ranks)


def _workload(request: Request) -> Workload:
    made = request.source.build()
    if request.checkpointing:
        BlockCheckpointing(made.model).on()
    return made


def _with_batch(request: Request) -> tuple[dict[str, Any], list[str]]:
    """The configuration with the requested micro-batch in it; the global batch stays where it is a multiple."""
    config, notices = copy.deepcopy(request.config), []
    given = {name: config.get(name) for name in (TOTAL, MICRO, ACCUMULATION)}
    numbers = {name: value for name, value in given.items() if isinstance(value, int) and not isinstance(value, bool)}
    micro = request.micro_batch
    if micro is None and TOTAL not in numbers and MICRO not in numbers:
        micro = 1
        notices.append("the configuration leaves the micro-batch open; planned with 1 sample")
    if micro is None:
        return config, notices
    config[MICRO] = micro
    total = numbers.get(TOTAL)
    if total is None:
        config.pop(TOTAL, None)
    elif total % (micro * request.machine.ranks) == 0:
        config.pop(ACCUMULATION, None)
    else:
        config.pop(TOTAL)
        notices.append(
            f"{TOTAL} {total} is no multiple of micro-batch {micro} x {request.machine.ranks} ranks, so it was left out"
        )
    return config, notices
