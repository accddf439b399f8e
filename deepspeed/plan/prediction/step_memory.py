"""Predicts the memory of a step by part, on the pipeline stage that needs most.

A rank holds states all the time and activations as long as its backward needs them. The peak is the highest of four
moments: the gradient of the logits, the gradient of the head's weight, the backward of the last block, and that of the
first block. Each moment adds its own tensors. The allocator of the device rounds sizes up and leaves gaps;
the driver and the communicators use memory outside tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepspeed.plan.pipeline import Pipeline
from deepspeed.plan.prediction.block import BlockTimes
from deepspeed.plan.prediction.layout import ParallelLayout

STATES = ("parameters", "gradients", "optimizer states")
"""Names of the parts that a rank holds all the time."""
_GAPS = 0.11
"""What torch's caching allocator reserves beyond tensors that come and go, as a share of these: sizes rounded up, and
gaps that no tensor fits into. One constant, from the fitting half of the published runs that state what was reserved;
0.10 to 0.15 do about as well there."""
_REUSED = 0.5e9  # elements before the loss that are still gathered after it: half of stage3_max_reuse_distance
_CONTEXT = 512 * 2**20  # bytes of a CUDA context with torch's kernels and a workspace of cuBLAS: a rough value
_CHANNELS = 16  # of a communicator of NCCL between the devices of a node with NVSwitch
_CHANNEL_BYTES = 2 * 5 * 2**20  # ring and tree: 4 MiB (NCCL_BUFFSIZE) and 1 MiB of the two low-latency protocols


@dataclass(frozen=True)
class MemoryParts:
    """The bytes of the stage that needs most, at the moment when it needs most."""

    tensors: dict[str, float] = field(default_factory=dict)  # bytes of tensors by purpose
    gaps: float = 0.0  # bytes that the allocator reserves beyond them, because it rounds sizes up and leaves gaps
    # Bytes that were freed before the peak and that the allocator keeps: the 16-bit logits, in a block too small for
    # the fp32 logits. It releases such blocks before it runs out of memory.
    cached: float = 0.0
    context: float = 0.0  # bytes of the driver and its libraries
    communicators: float = 0.0  # bytes of the buffers of all communicators

    @property
    def reserved(self) -> float:
        """Bytes that the allocator has (``torch.cuda.max_memory_reserved``)."""
        return sum(self.tensors.values()) + self.gaps + self.cached

    @property
    def states(self) -> float:
        """Bytes of parameters, gradients and optimizer states."""
        return sum(self.tensors.get(name, 0.0) for name in STATES)

    def needed(self, headroom: float) -> float:
        """Returns the bytes that a device must have; at least ``headroom`` for memory outside tensors."""
        return sum(self.tensors.values()) + max(headroom, self.gaps + self.context + self.communicators)

    def rows(self) -> list[tuple[str, float]]:
        """Returns all parts with their names in tables."""
        more = {"gaps between tensors": self.gaps, "freed, kept by the allocator": self.cached}
        more |= {"driver and its libraries": self.context, "buffers of communicators": self.communicators}
        return [(name, nbytes) for name, nbytes in (self.tensors | more).items() if nbytes > 0]


@dataclass
class StageState:
    """Which part of the model one stage has."""

    parameters: float = 0.0  # elements of a rank
    experts: float = 0.0  # elements of experts among them
    ends: float = 0.0  # elements of the embedding and the head among them
    layers: int = 0  # blocks of all its chunks
    chunks: list[int] = field(default_factory=list)  # positions of its chunks in the model
    has_head: bool = False  # it has the head and computes the loss


class StepMemory:
    """Computes the memory of every stage; ``counts`` are the blocks of each chunk."""

    def __init__(
        self,
        layout: ParallelLayout,
        pipeline: Pipeline,
        counts: Sequence[int],
        block: BlockTimes,
        first: BlockTimes,
        last: BlockTimes,
    ) -> None:
        self._layout, self._pipeline, self._counts = layout, pipeline, counts
        self._block, self._last = block, last
        self.stages = [StageState() for _ in range(layout.pipe)]
        for place, stage in enumerate(pipeline.stage_of):
            share = self.stages[stage]
            share.chunks.append(place)
            share.layers += counts[place]
            share.parameters += counts[place] * block.parameters
            share.experts += counts[place] * block.expert_parameters
            share.has_head |= place == len(counts) - 1
            share.ends += (first.parameters if place == 0 else 0) + (last.parameters if place == len(counts) - 1 else 0)
        for share in self.stages:
            share.parameters += share.ends

    @property
    def least(self) -> float:
        """Bytes of the states on the stage that has most."""
        return max(sum(self._states(share, are_shards=True).values()) for share in self.stages)

    def parts(self) -> MemoryParts:
        """Returns the parts on the stage that needs most."""
        found = [self._of_stage(number, share) for number, share in enumerate(self.stages)]
        return max(found, key=lambda parts: parts.reserved)

    def _of_stage(self, number: int, share: StageState) -> MemoryParts:
        layout = self._layout
        held = self._states(share, self._layout.stage >= 2)
        held["activations"] = self._in_flight(number) * share.layers / len(share.chunks) * self._block.kept
        if share.has_head and layout.keeps_outputs and layout.pipe > 1:
            each = self._last.output * (1 if layout.has_fused_loss else 2)  # in fp32, as the loss takes them
            held["logits of all micro-batches"] = layout.accumulation * each
        moments = [self._first_block_of_backward(share), self._end_of_backward(share)]
        if share.has_head:
            moments.append({"logits and loss": self._last.kept + self._last.passing, **self._gathered_with_head(share)})
            moments.append(self._gradient_of_head(share))
        if self._has_new_gradients:
            moments = [{"gradients": 0.0, **moment} for moment in moments]
        # Interleaved, all micro-batches in one group: a chunk finishes its backwards before the previous one starts.
        # FSDP allocates gradients in the first backward; others have buffers for them.
        if layout.is_fsdp and layout.chunks > 1 and layout.accumulation <= layout.pipe:
            moments = self._backwards_of_chunks(number, share, held["gradients"], moments)
        tensors = max((held | moment for moment in moments), key=lambda parts: sum(parts.values()))
        passing = sum(nbytes for name, nbytes in tensors.items() if name not in STATES)
        return MemoryParts(
            tensors,
            _GAPS * passing,
            0.0 if layout.has_fused_loss or not share.has_head else self._last.output,
            _CONTEXT,
            self._communicators * float(_CHANNELS * _CHANNEL_BYTES),
        )

    @property
    def _has_new_gradients(self) -> bool:
        """True where gradients do not exist before their backward: one micro-batch, and no buffer for sums in fp32."""
        layout = self._layout
        return layout.accumulation == 1 and (layout.stage >= 2 or layout.gradient_bytes == 2)

    # -- moments -----------------------------------------------------------------------------------------------------

    def _first_block_of_backward(self, share: StageState) -> dict[str, float]:
        """Returns the parts while the last block's backward runs: nothing that blocks keep is freed yet."""
        layout = self._layout
        found = {"work of a block's backward": self._block.passing}
        if layout.stage == 3:
            found["gathered layers"] = self._gathered(share, 2 * self._shared)
        if layout.stage >= 2:  # of this block, and of the one before, which are being reduced
            waiting = 2 * self._last.parameters if layout.is_fsdp and share.has_head else 0.0
            found["gradients in flight"] = 2 * layout.gradient_bytes * self._shared + waiting
        return found

    def _end_of_backward(self, share: StageState) -> dict[str, float]:
        """Returns the parts while the first block's backward runs: all gradients are there, one block's activations."""
        kept = self._block.kept if self._layout.pipe == 1 else 0.0
        if not self._has_new_gradients or not kept:
            return self._first_block_of_backward(share)
        return {
            "gradients": self._states(share, self._layout.stage >= 1)["gradients"],
            "activations": kept,
            **self._first_block_of_backward(share),
        }

    def _backwards_of_chunks(
        self, number: int, share: StageState, gradients: float, moments: Sequence[dict[str, float]]
    ) -> list[dict[str, float]]:
        """Returns the memory by part when each chunk begins its backwards; ``moments`` are those of the last chunk."""
        found: list[dict[str, float]] = []
        behind = share.parameters
        for place, chunk in enumerate(share.chunks):
            in_flight = min(self._in_flight(number), (place + 1) * self._layout.accumulation)
            held = {
                "gradients": gradients * behind / share.parameters,
                "activations": in_flight * share.layers / len(share.chunks) * self._block.kept,
            }
            is_last = place == len(share.chunks) - 1
            found += [held | each for each in (moments if is_last else [self._first_block_of_backward(share)])]
            behind -= self._counts[chunk] * self._block.parameters
        return found

    def _gradient_of_head(self, share: StageState) -> dict[str, float]:
        found = {"logits and loss": self._last.output, **self._gathered_with_head(share)}
        if self._layout.stage >= 2:
            found["gradients in flight"] = (2 + self._layout.gradient_bytes) * self._last.parameters
        return found

    def _gathered_with_head(self, share: StageState) -> dict[str, float]:
        if self._layout.stage != 3:
            return {}
        return {"gathered layers": self._gathered(share, self._last.parameters + self._shared)}

    def _gathered(self, share: StageState, least: float) -> float:
        """Returns the bytes of gathered parameters, at least of ``least`` elements.

        FSDP has the embedding, the head, and the blocks that are at work. This engine keeps from forward to backward
        what is used again within ``stage3_max_reuse_distance``.
        """
        if self._layout.is_fsdp:
            return 2 * (share.ends + min(least, 2 * self._shared))
        own = share.experts if self._layout.expert_shard_group.size == 1 else 0
        return 2 * max(least, min(share.parameters - own, _REUSED))

    @property
    def _shared(self) -> float:
        """Elements of a block that its rank shares with others: all but experts that no other rank has."""
        has_all = self._layout.expert_shard_group.size == 1
        return self._block.parameters - (self._block.expert_parameters if has_all else 0)

    # -- states of a stage -------------------------------------------------------------------------------------------

    def _states(self, share: StageState, are_shards: bool) -> dict[str, float]:
        """Returns the parts that a rank holds all the time; ``are_shards``: of its gradients only its own shard."""
        layout, found = self._layout, dict.fromkeys(STATES, 0.0)
        for elements, shards, weight_shards in (
            (share.parameters - share.experts, layout.shards, layout.weight_shards),
            (share.experts, layout.expert_shards, max(layout.weight_shards / layout.experts, 1)),
        ):
            if layout.stage < 3:
                found["parameters"] += 2 * elements
            elif not layout.is_fsdp and not layout.offload_parameters:
                found["parameters"] += 2 * elements / weight_shards
            width = 4 if layout.is_fsdp and layout.stage == 3 else layout.summed_bytes or layout.gradient_bytes
            if not (layout.offload and layout.stage >= 2):
                found["gradients"] += elements * width / (shards if are_shards else 1)
            if not layout.offload:
                found["optimizer states"] += 12 * elements / (shards if layout.stage >= 1 else 1)
        return found

    def _in_flight(self, stage: int) -> float:
        """Returns for how many micro-batches, of one chunk each, a stage keeps activations."""
        layout = self._layout
        pipe, chunks, count = layout.pipe, layout.chunks, layout.accumulation
        if pipe == 1:
            return 1
        if layout.schedule == "gpipe":
            return count * chunks
        if layout.schedule not in ("1f1b", "interleaved"):
            return self._pipeline.in_flight(stage, min(count, 8 * pipe))
        if chunks > 1:
            return min((pipe - stage - 1) * 2 + (chunks - 1) * pipe + 1, count * chunks)
        return min(pipe - stage, count)

    @property
    def _communicators(self) -> int:
        """Communicators of a rank: one for each axis, and that of all ranks."""
        layout = self._layout
        sizes = [layout.tensor, layout.pipe, layout.context, layout.experts]
        sizes += [layout.shard_group.size, layout.replica_group.size]
        return sum(size > 1 for size in sizes) + (layout.ranks > 1 and layout.ranks not in sizes)
