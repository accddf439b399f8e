"""Makes a plan from a request: simulates one rank of each kind, and derives figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing.feature import BlockCheckpointing
from deepspeed.axes import DATA, SEQUENCE
from deepspeed.comm.job.grid import grid_mesh
from deepspeed.comm.job.mesh import Mesh, data_mesh
from deepspeed.comm.job.mesh_sources import mesh_of_config
from deepspeed.config import parse
from deepspeed.config.degrees import data_parallel_size
from deepspeed.config.sections.root import Root
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import quiet
from deepspeed.plan.configs import changed, keys_of, stage_of, with_batch
from deepspeed.plan.environment import SimulatedPart
from deepspeed.plan.kinds import RankKind, kind_of, kinds_of, needed
from deepspeed.plan.memory import META
from deepspeed.plan.models import Workload
from deepspeed.plan.pipeline import cut_of
from deepspeed.plan.result import Plan, PlannedPart, Request
from deepspeed.plan.simulated_stage import Stage
from deepspeed.plan.simulation import heaviest_rank, simulate_step
from deepspeed.zero.placement import Placement


def make_plan(request: Request, *, compare: bool = True) -> Plan:
    """Plans one request; ``compare``: also finds the activations with the other setting of checkpointing.

    Raises:
        DeepSpeedConfigError: The configuration cannot run, or the model cannot be built. The message is the engine's.
    """
    start = time.perf_counter()
    with quiet():  # the devices of this machine are irrelevant
        get_accelerator()
    ranks, pipeline = request.machine.ranks, request.pipeline
    try:
        data_ranks = data_parallel_size(keys_of(request.config), ranks, stages=pipeline.stages)
    except DeepSpeedConfigError:  # parse refuses what does not fit
        data_ranks = ranks
    config, notices = with_batch(request.config, data_ranks, request.micro_batch, request.accumulation)
    parsed = parse(config, dp_world_size=lambda root: data_parallel_size(root, ranks, stages=pipeline.stages))
    notices += parsed.notices
    assert parsed.batch is not None
    section = config.get("optimizer")
    if not isinstance(section, dict) or section.get("type") is None:
        notices.append("the configuration names no optimizer; AdamW stands for the one that the script makes")
    simulated_config = config
    if (config.get("zero_optimization") or {}).get("mics_hierarchical_params_gather"):
        simulated_config = changed(config, mics_hierarchical_params_gather=None)
        notices.append(
            "gathers in two steps (mics_hierarchical_params_gather) are planned as gathers in one: they move "
            "as many bytes, fewer of them between nodes, and need memory for one more slice of a bucket"
        )
    mesh = mesh_of(parsed.root, ranks, pipeline.stages)
    part = SimulatedPart(
        config=simulated_config,
        accumulation_steps=parsed.batch.accumulation_steps,
        micro_batch=parsed.batch.micro_batch_size,
        sequence_length=request.sequence_length,
        mesh=mesh,
        rank=0,
        kind=request.kind,
        autocast=parsed.root.torch_autocast.enabled,
    )
    parts = _plan_kinds(request, part, notices, compare=compare)
    return Plan(
        request=request,
        config=config,
        mesh=mesh,
        micro_batch=part.micro_batch,
        accumulation_steps=part.accumulation_steps,
        parts=parts,
        notices=notices,
        seconds=time.perf_counter() - start,
    )


def _plan_kinds(request: Request, part: SimulatedPart, notices: list[str], *, compare: bool) -> list[PlannedPart]:
    """Plans one rank of each kind, except kinds that cannot need most memory."""
    pipeline, micro_batches = request.pipeline, part.accumulation_steps
    if pipeline.stages == 1:
        kind = kinds_of(part.mesh)[0] if request.rank is None else kind_of(part.mesh, request.rank)
        own = replace(part, rank=kind.rank)
        return [_plan_kind(request, own, kind, notices, compare=compare)]
    row = request.source.in_row()
    with torch.device(META):
        cut = cut_of(row.layers(), pipeline)
    schedule = pipeline.of(micro_batches)
    chunks = [schedule.chunks_of(stage) for stage in range(pipeline.stages)]
    contents = [tuple(cut.contents[chunk] for chunk in own) for own in chunks]
    in_flight = [pipeline.in_flight(stage, micro_batches) for stage in range(pipeline.stages)]
    kinds = kinds_of(part.mesh)
    chosen = needed(kinds, contents, in_flight) if request.rank is None else [kind_of(part.mesh, request.rank)]
    found = []
    for kind in chosen:
        stage = Stage(kind.stage, pipeline, row, cut.bounds, pipeline.enough(micro_batches), request.checkpointing)
        made = _plan_kind(request, replace(part, rank=kind.rank, stage=stage), kind, notices, compare=compare)
        alike = [place for place, other in enumerate(contents) if other == contents[kind.stage]]
        layers = {place: tuple(cut.bounds[chunk : chunk + 2] for chunk in chunks[place]) for place in alike}
        found.append(replace(made, layers=layers, in_flight={place: in_flight[place] for place in alike}))
    return found


def _plan_kind(
    request: Request, part: SimulatedPart, kind: RankKind, notices: list[str], *, compare: bool
) -> PlannedPart:
    named = (part.config.get("optimizer") or {}).get("type")
    if named == "Muon" and request.rank is None and part.mesh.world_size > kind.stages and stage_of(part.config) > 0:
        part = replace(part, rank=heaviest_rank(_workload(request, part), part))
        notices.append(f"Muon: rank {part.rank} is planned, which orthogonalizes the largest matrix")
    made, other_setting = _workload(request, part), None
    if compare:
        try:
            other_setting = _other_checkpointing(request, made)
        except DeepSpeedConfigError as error:
            notices.append(str(error))
    found = simulate_step(made, part, other_setting)
    activations = {request.checkpointing: found.activations}
    if found.other_activations is not None:
        activations[not request.checkpointing] = found.other_activations
    notices += [notice for notice in found.notices if notice not in notices]
    return PlannedPart(replace(kind, rank=part.rank), found, activations)


def _other_checkpointing(request: Request, workload: Workload | None) -> Callable[[Any], None]:
    """Returns the change that switches activation checkpointing."""
    if workload is None:  # a stage
        return lambda engine: engine.module.set_checkpoint_interval(int(not request.checkpointing))
    model, checkpointing = workload.model, BlockCheckpointing(workload.model)

    def switch(_engine: Any) -> None:
        if request.checkpointing:
            checkpointing.off()
        else:
            model.train()
            checkpointing.on()

    return switch


def mesh_of(root: Root, ranks: int, stages: int = 1) -> Mesh:
    """Returns the ranks of a job along the axes of its configuration that have more than one."""
    placement = Placement.of_section(root.zero_optimization, ranks)
    whole = mesh_of_config(root, ranks, stages=stages)
    if placement.shard_ranks not in (None, ranks) and whole.size(SEQUENCE) == 1:
        return grid_mesh(ranks, placement.shard_ranks)
    axes = tuple(entry for entry in whole.axes if entry[1] > 1)
    return Mesh(axes) if len(axes) > 1 else data_mesh(ranks) if not axes or axes[0][0] == DATA else Mesh(axes)


def _workload(request: Request, part: SimulatedPart) -> Workload | None:
    """Returns the model and its inputs; None for a pipeline stage, which is built during its simulation."""
    if part.stage is not None:
        return None
    made = request.source.build()
    if request.checkpointing:
        made.model.train()
        BlockCheckpointing(made.model).on()
    return made
