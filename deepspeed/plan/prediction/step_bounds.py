"""Lower bounds of a step of a layout: from what must be computed and moved, independent of the prediction."""

from __future__ import annotations

from dataclasses import replace

from deepspeed.axes import DATA, EXPERT, SEQUENCE, TENSOR
from deepspeed.plan.decoder import DecoderShape
from deepspeed.plan.machine import Machine
from deepspeed.plan.prediction.layout import ParallelLayout
from deepspeed.plan.prediction.network_model import NetworkModel, RankGroup
from deepspeed.plan.step_totals import StepTotals
from deepspeed.plan.times import PlannedTransfer, lower_bounds


def least_flops(shape: DecoderShape, layout: ParallelLayout, tokens: int) -> float:
    """Returns the operations of a rank in a step, at least: the mean of all ranks, nothing recomputed."""
    block = shape.attention_parameters + (shape.experts_per_token if shape.experts else 1) * shape.expert_parameters
    scores = (6 if shape.has_fused_attention else 12) * shape.layers * shape.heads * shape.width_of_head * tokens
    each = 6 * (shape.layers * (block - 4 * shape.hidden) + shape.vocab * shape.hidden) + scores
    return layout.samples * tokens * each / layout.ranks


def layout_bounds(shape: DecoderShape, layout: ParallelLayout, machine: Machine, tokens: int) -> dict[str, float]:
    """Returns the seconds that each resource is busy in a step, at least, as ``times.lower_bounds`` does for a plan.

    The stage with the fewest blocks is counted, embedding and head are left out.
    """
    network = NetworkModel(machine)
    layers = shape.layers // (layout.pipe * layout.chunks) * layout.chunks - 2 * (layout.lighter_ends or 0)
    passes = max(layers, 0) * layout.accumulation  # of a block in one direction
    rows = layout.micro_batch * tokens / layout.context  # tokens of a rank
    moved: list[PlannedTransfer] = []

    def add(name: str, axis: str, calls: float, nbytes: float, group: RankGroup) -> None:
        domains, near = network.spread(group)
        inside, between = nbytes * (near - 1) / near, nbytes * (domains - 1) / domains / near
        moved.append(PlannedTransfer(name, axis, int(calls), int(nbytes), int(inside), int(between)))

    def add_to_all(axis: str, nbytes: float, group: RankGroup, copies: int = 1) -> None:
        domains, near = network.spread(group)
        inside, between = nbytes * (near - 1) / group.size, nbytes * (group.size - near) / group.size
        moved.append(PlannedTransfer("all_to_all", axis, 1, int(nbytes), int(inside), int(between / copies)))

    experts = shape.experts * shape.expert_parameters / layout.experts / layout.tensor
    dense = (shape.attention_parameters + (0 if shape.experts else shape.expert_parameters)) / layout.tensor
    for elements, weights, shards in (
        (dense, layout.weight_group, layout.shard_group),
        (experts, layout.expert_weight_group, layout.expert_shard_group),
    ):
        if layout.stage == 3:
            add("all_gather", DATA, 2 * passes, 2 * passes * 2 * elements, weights)
            add("reduce_scatter", DATA, passes, passes * layout.gradient_bytes * elements, shards)
        else:  # an all-reduce, or a reduction and a gather
            nbytes = layout.gradient_bytes + (2 if layout.stage else layout.gradient_bytes)
            add("all_reduce", DATA, 1, max(layers, 0) * nbytes * elements, shards)
    if layout.tensor > 1:  # in chunks, an exchange overlaps with its product
        axis = "chunks" if layout.overlaps_tensor else TENSOR
        add("all_reduce", axis, 4 * passes, 4 * passes * 2 * 2 * rows * shape.hidden, layout.tensor_group)
    if layout.context > 1 and not layout.is_ring:
        width = 2 * (shape.heads + (shape.kv_heads or shape.heads)) * shape.width_of_head / layout.tensor
        add_to_all(SEQUENCE, 2 * passes * 2 * rows * width, layout.context_group)
    if shape.experts:
        copies = shape.experts_per_token  # of a token, of which one crosses the network where a program does its best
        add_to_all(EXPERT, 4 * passes * 2 * rows * copies * shape.hidden, layout.expert_group, copies)
    flow = StepTotals(flops=int(least_flops(shape, layout, tokens)))
    return lower_bounds(flow, moved, replace(machine, multiplies_in_fp8=layout.is_fp8))
