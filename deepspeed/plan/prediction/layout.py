"""The layout of a job: how ranks share a decoder and a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed.axes import EXPERT, SEQUENCE, TENSOR
from deepspeed.config import parse
from deepspeed.config.batch import MICRO, TOTAL, BatchSizes
from deepspeed.config.degrees import degrees
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.configs import keys_of, number_in, offloads_of, with_batch
from deepspeed.plan.pipeline import Pipeline
from deepspeed.plan.prediction.network_model import RankGroup

RECOMPUTATIONS = ("none", "selective", "attention", "full")
"""What backward recomputes: nothing; all except every other matrix product and fused attention (per operation);
attention between its projections; whole blocks."""


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of all axes, the batch, and options that save memory or time.

    Neighboring ranks share layers, then sequences, then batches; stages are furthest apart.
    """

    tensor: int = 1  # ranks that share layers
    pipe: int = 1  # stages of a pipeline
    chunks: int = 1  # chunks of each stage
    schedule: str = "1f1b"  # the schedule of the pipeline
    context: int = 1  # ranks that share sequences
    is_ring: bool = True  # these ranks use ring attention; otherwise they exchange tokens for heads
    # tokens are assigned so that causal attention has equally many scores on all ranks of the ring
    balances_ring: bool = True
    experts: int = 1  # ranks that share experts; they are neighbors among those that share a batch
    data: int = 1  # ranks that share a batch
    stage: int = 0  # ZeRO stage
    shard_ranks: int | None = None  # ranks that share states, if fewer than those that share a batch; None: all
    micro_batch: int = 1  # samples of a forward
    accumulation: int = 1  # micro-batches of a step
    recompute: str = "none"  # one of :data:`RECOMPUTATIONS`
    is_fp8: bool = False  # linear layers of blocks multiply in fp8
    is_compiled: bool = False  # elementwise operations are fused
    has_fused_loss: bool = False  # one kernel computes the loss from 16-bit logits and writes their gradient there
    cuts_norms: bool = False  # with ``tensor``, norms and residual sums work on a part of the sequence
    cuts_vocabulary: bool = True  # with ``tensor``, embedding, head and loss are cut over the vocabulary
    overlaps_tensor: bool = False  # exchanges between tensor ranks run beside the products that need them, in chunks
    overlaps_data: bool = True  # gradients are sent while backward runs
    # At stages 1 and 2 updated parameters are gathered while the next forward runs, as in Megatron. This engine waits
    # for them.
    overlaps_gather: bool = False
    gradient_bytes: int = 2  # bytes of an element of the exchanged gradients
    lighter_ends: int | None = None  # how many layers fewer the first and the last chunk have; None: as few as possible
    imbalance: float = 1.0  # tokens of the busiest rank's experts over the mean
    # optimizer states are in host memory, which updates them; at stages 2 and 3 shards of gradients too
    offload: bool = False
    offload_parameters: bool = False  # at stage 3, shards of parameters are in host memory
    # with ``offload``, optimizer states are in files: read, updated and written one after the other
    states_on_disk: bool = False
    # With ``offload_parameters``, elements of a rank's shards that stay in host memory; the others are in files. None:
    # all stay.
    most_in_host: int | None = None
    # stage 3 as in FSDP: shards of parameters and gradients are in fp32 only and cast when gathered; embedding and head
    # are gathered together until the end of the backward, and their gradients are reduced then
    is_fsdp: bool = False
    # the last stage of a pipeline keeps the logits of all micro-batches until the step ends, as
    # ``torch.distributed.pipelining`` does unless it is set not to return them
    keeps_outputs: bool = False
    # bytes of an element of the gradients kept until the update; None: ``gradient_bytes``
    summed_bytes: int | None = None
    # megatron's behavior instead of torch's: with ``recompute="full"`` whole blocks are recomputed; with ``is_fp8``
    # weights are cast once per step; with ``cuts_norms`` tokens come before samples, so that gathered parts are in
    # order
    is_megatron: bool = False
    # the product that computes the gradient of a weight adds it to the sum over micro-batches
    sums_in_products: bool = False
    # at stage 3, neighboring ranks that share 16-bit weights, if fewer than those that share states
    # (``zero_hpz_partition_size``); None: all of these
    weight_ranks: int | None = None
    # a token crosses the network once for each node that has experts of its choice, whose ranks pass it on, as DeepEP
    # and HybridEP do; otherwise once for each expert, as in this engine
    sends_once_per_node: bool = False

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTATIONS:
            raise DeepSpeedConfigError(
                f"recompute={self.recompute!r}: expected one of {', '.join(RECOMPUTATIONS)}; choose one of them"
            )
        for name, least in (("shard_ranks", 1), ("weight_ranks", 1), ("lighter_ends", 0)):
            number = getattr(self, name)
            if number is not None and number < least:
                raise DeepSpeedConfigError(f"{name}={number}: expected {least} or more, or leave it out")
        if self.gradient_bytes not in (2, 4):
            raise DeepSpeedConfigError(
                f"gradient_bytes={self.gradient_bytes}: expected 2 (16-bit gradients) or 4 (fp32); choose one of them"
            )
        if not 1 <= self.imbalance < math.inf:
            raise DeepSpeedConfigError(
                f"imbalance={self.imbalance}: expected 1 or more, as it divides the busiest rank's tokens by the mean; "
                "1 means that tokens are spread evenly"
            )
        if self.data * self.context % self.experts:
            raise DeepSpeedConfigError(
                f"ep={self.experts}: must divide the {self.data * self.context} ranks that share a batch or its "
                "sequences; choose a divisor"
            )
        if self.data * self.context % self.shards:
            raise DeepSpeedConfigError(
                f"shard_ranks={self.shard_ranks}: must divide the {self.data * self.context} ranks that share a batch; "
                "choose a divisor"
            )
        if self.shards % self.weight_shards:
            raise DeepSpeedConfigError(
                f"weight_ranks={self.weight_ranks}: must divide the {self.shards} ranks that share states; choose a "
                "divisor"
            )

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.tensor * self.context * self.data * self.pipe

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.accumulation * self.data

    @property
    def shards(self) -> int:
        """Ranks over which states are spread; 1 at stage 0."""
        return (self.shard_ranks or self.data * self.context) if self.stage else 1

    @property
    def expert_shards(self) -> float:
        """Ranks over which the states of an expert are spread."""
        return max(self.shards / self.experts, 1)

    @property
    def weight_shards(self) -> int:
        """Ranks over which 16-bit weights are spread at stage 3."""
        return min(self.weight_ranks or self.shards, self.shards) if self.stage == 3 else self.shards

    @property
    def tensor_group(self) -> RankGroup:
        """Ranks that share layers."""
        return RankGroup(self.tensor)

    @property
    def context_group(self) -> RankGroup:
        """Ranks that share sequences."""
        return RankGroup(self.context, self.tensor)

    @property
    def expert_group(self) -> RankGroup:
        """Ranks that share experts: of those that share a batch, or of these and those that share sequences."""
        return RankGroup(self.experts, self.tensor * (1 if self.data % self.experts else self.context))

    @property
    def shard_group(self) -> RankGroup:
        """Ranks that share states, or sum gradients at stage 0."""
        return RankGroup(self.shard_ranks or self.data * self.context, self.tensor)

    @property
    def weight_group(self) -> RankGroup:
        """Ranks among which stage 3 gathers weights."""
        return RankGroup(self.weight_shards, self.tensor)

    @property
    def weight_copies(self) -> RankGroup:
        """Ranks with the same shard of the weights, which gather it from their states after each update."""
        return RankGroup(self.shards // self.weight_shards, self.tensor * self.weight_shards)

    @property
    def replica_group(self) -> RankGroup:
        """Ranks with the same shard, which sum its gradients."""
        shards = self.shard_group.size
        return RankGroup(self.data * self.context // shards, self.tensor * shards)

    @property
    def expert_shard_group(self) -> RankGroup:
        """Ranks that share the states of the same experts, or sum their gradients at stage 0."""
        return RankGroup(max(self.shard_group.size // self.experts, 1), self.tensor * self.experts)

    @property
    def expert_replica_group(self) -> RankGroup:
        """Ranks with the same shard of the same experts, which sum its gradients."""
        shards = self.expert_shard_group
        return RankGroup(self.data * self.context // self.experts // shards.size, shards.size * shards.stride)

    @property
    def expert_weight_group(self) -> RankGroup:
        """Ranks among which stage 3 gathers the weights of their experts."""
        return RankGroup(max(self.weight_shards // self.experts, 1), self.tensor * self.experts)

    @property
    def expert_weight_copies(self) -> RankGroup:
        """Ranks with the same shard of the weights of the same experts."""
        weights = self.expert_weight_group
        return RankGroup(self.expert_shard_group.size // weights.size, weights.size * weights.stride)

    @property
    def stage_stride(self) -> int:
        """Distance from a rank to the one of the next stage."""
        return self.tensor * self.context * self.data

    def describe(self) -> str:
        """Returns the layout in a few words."""
        words = []
        for name, size in (("tensor", self.tensor), ("pipe", self.pipe), ("context", self.context)):
            if size > 1:
                words.append(f"{name} {size}")
        if self.chunks > 1:
            words.append(f"{self.chunks} chunks")
        if self.pipe > 1 and self.schedule not in ("1f1b", "interleaved"):
            words.append(self.schedule)
        if self.experts > 1:
            words.append(f"experts {self.experts}")
        words.append(f"data {self.data}, stage {self.stage}")
        if self.shard_ranks is not None:
            words.append(f"shards over {self.shard_ranks}")
        if self.weight_ranks is not None:
            words.append(f"weights over {self.weight_ranks}")
        words.append(f"micro-batch {self.micro_batch} x {self.accumulation}")
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        return ", ".join(words)


def layout_of(
    config: Mapping[str, Any],
    ranks: int,
    *,
    pipeline: Pipeline,
    tensor: int | None = None,
    sequence: int | None = None,
    ep: int | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    **options: Any,
) -> ParallelLayout:
    """Returns the layout of a configuration; raises DeepSpeedConfigError where it cannot be divided so."""
    root = keys_of(config)
    wanted = degrees(root)
    tensor, sequence = tensor or wanted[TENSOR], sequence or wanted[SEQUENCE]
    model = tensor * sequence * pipeline.stages
    data, left = divmod(ranks, model)
    if left or not data:
        raise DeepSpeedConfigError(
            f"{ranks} ranks are not a multiple of tensor {tensor} x sequence {sequence} x pipe {pipeline.stages}; "
            "change a degree or the number of nodes"
        )
    batch = _batch(config, data, micro_batch, accumulation)
    states, parameters = offloads_of(config)
    shards = root.zero_optimization.offload_param
    hierarchical = root.zero_optimization.zero_hpz_partition_size
    half = root.bf16.enabled or root.fp16.enabled
    accumulated = root.data_types.grad_accum_dtype
    found: dict[str, Any] = {
        "is_ring": root.sequence_parallel.mode != "ulysses",
        "stage": root.zero_optimization.stage,
        "shard_ranks": max(root.zero_optimization.mics_shard_size, 0) or None,
        "weight_ranks": hierarchical if hierarchical > 1 else None,
        "is_compiled": root.compile.enabled or root.compile.deepcompile,
        "cuts_norms": tensor > 1 and root.tensor_parallel.sequence_parallel_norms,
        "gradient_bytes": 4 if accumulated == "fp32" or not half else 2,
        "offload": states != "none",
        "offload_parameters": parameters != "none",
        "states_on_disk": states == "nvme",
        "most_in_host": shards.max_in_cpu if shards is not None and parameters == "nvme" else None,
    }
    if half and accumulated is None and options.get("gradient_bytes") is None:
        found["summed_bytes"] = 4
    experts = ep or wanted[EXPERT]
    return ParallelLayout(
        tensor=tensor,
        pipe=pipeline.stages,
        chunks=len(pipeline.stage_of) // pipeline.stages,
        schedule=pipeline.schedule,
        context=sequence,
        experts=experts,
        data=data,
        micro_batch=batch.micro_batch_size,
        accumulation=batch.accumulation_steps,
        **{**found, **{name: value for name, value in options.items() if value is not None}},
    )


def _batch(config: Mapping[str, Any], data: int, micro: int | None, steps: int | None) -> BatchSizes:
    total, given = number_in(config, TOTAL), micro or number_in(config, MICRO)
    if steps is None and total is not None and given is not None and total % (given * data):
        raise DeepSpeedConfigError(
            f"{TOTAL} {total} is not a multiple of micro-batch {given} x {data} ranks that share a batch; change "
            "one of them"
        )
    batch = parse(with_batch(config, data, micro, steps)[0], dp_world_size=data).batch
    assert batch is not None, "the ranks are known"
    return batch
