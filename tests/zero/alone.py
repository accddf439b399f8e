"""One rank of ZeRO without an engine: the runtime and the optimizer over any transport."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepspeed.comm.transports.transport import Transport
from deepspeed.config.batch import BatchSizes
from deepspeed.engine.batches import Batches
from deepspeed.engine.loss_scaling import LossScaling
from deepspeed.engine.train_step import TrainStep
from deepspeed.engine.zero_optimizer import DeepSpeedZeroOptimizer
from deepspeed.engine_feature import EngineHooks
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.gather.schedule import GatherLimits
from deepspeed.zero.gradient.gradient_sum import GradientDestination
from deepspeed.zero.gradient.reduction_policy import ReductionPolicy
from deepspeed.zero.group import BucketGroup, Groups
from deepspeed.zero.model_states import RuntimeOptions
from deepspeed.zero.placement import Placement, Tier
from deepspeed.zero.runtime import MicroBatch, ZeroRuntime, build_runtime
from deepspeed.zero.storage import Memory, MemoryTracker
from deepspeed.zero.tiling.layout import Limits, bucket_layout
from deepspeed.zero.tiling.tiles import Tile
from deepspeed.zero.update.loop import UpdateStrategy
from deepspeed.zero.update.updater import UpdateOptions, Updater

CPU = torch.device("cpu")
WIDTH = 8


class Block(nn.Module):
    """Two linear layers; ``down`` may be left out of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor, *, short: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        return x + (hidden[:, :WIDTH] if short else self.down(hidden))


class Stack(nn.Module):
    """Blocks of which a forward may leave some out, between two linear layers; returns the loss."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, skip: Sequence[int] = ()) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number not in skip:
                x = block(x)
        return self.head(x).square().mean()


def stack(depth: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32) -> Stack:
    """The model with the same values wherever it is asked for, in whichever thread."""
    model = Stack(depth)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    return model.to(dtype)


def batch(*position: int, samples: int = 4) -> torch.Tensor:
    """The samples at a position, such as step and rank."""
    seed = sum((number + 1) * 1009**place for place, number in enumerate(position))
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))


def policy_of(stage: int, **settings: Any) -> ReductionPolicy:
    """How gradients are combined at a stage."""
    defaults: dict[str, Any] = {
        "every_micro_batch": stage >= 2,
        "to_owner": stage >= 1,
        "reduce_dtype": lambda dtype: dtype,
        "accumulate_dtype": torch.float32,
        "reduces_sums_narrow": False,
    }
    return ReductionPolicy(**{**defaults, **settings})


def bucket_of(
    transport: Transport,
    params: list[nn.Parameter],
    *,
    is_sharded: bool = True,
    group: BucketGroup | None = None,
    memory_tracker: MemoryTracker | None = None,
    index: int = 0,
) -> Bucket:
    """A bucket of some parameters, named by their position, with their own values."""
    tiles = [Tile(f"p{number}", tuple(parameter.shape), 0) for number, parameter in enumerate(params)]
    dtype = params[0].dtype
    layout = bucket_layout(
        index, tiles, dtype=str(dtype).removeprefix("torch."), trainable=True, num_slices=transport.size
    )
    bucket = Bucket(
        layout,
        params,
        dtype=dtype,
        device=CPU,
        group=group or BucketGroup.over(transport),
        is_sharded=is_sharded,
        memory_tracker=memory_tracker or MemoryTracker(),
        memory=Memory(CPU),
    )
    flat = torch.zeros(layout.numel, dtype=dtype)
    for parameter, start in zip(params, layout.starts, strict=True):
        flat[start : start + parameter.numel()] = parameter.detach().reshape(-1)
    bucket.take_first_values(transport.my_slice(flat) if is_sharded else flat)
    bucket.take_addresses()
    return bucket


@dataclass
class Rank:
    """One rank that trains."""

    transport: Transport
    model: nn.Module
    runtime: ZeroRuntime
    optimizer: DeepSpeedZeroOptimizer
    micro_batches: int

    @property
    def updater(self) -> Updater:
        """Of its masters."""
        assert self.runtime.updater is not None
        return self.runtime.updater

    @property
    def reducer(self) -> Any:
        """Of its gradients."""
        return self.runtime.reducer

    def backward(self, loss: torch.Tensor, index: int = 0, *, sync: bool = True) -> None:
        """One backward of an update."""
        last = index == self.micro_batches - 1
        self.runtime.begin_backward(MicroBatch(index, index == 0, last), sync=sync)
        loss.backward()
        self.runtime.end_backward()

    def step(self, *losses: torch.Tensor) -> float:
        """An update from losses, one for each micro-batch; its norm."""
        for index, loss in enumerate(losses):
            self.backward(loss, index)
        self.optimizer.step()
        report = self.updater.last_report
        assert report is not None
        return report.norm

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of all parameters, gathered where they are sharded; a collective."""
        found = {}
        for bucket in self.runtime.buckets:
            if bucket.is_sharded:
                bucket.start_gather(exactly=True)
                bucket.finish_gather()
            for tile, parameter in zip(bucket.layout.tiles, bucket.params, strict=True):
                found[tile.name] = parameter.detach().clone()
            if bucket.is_sharded:
                bucket.reshard()
        return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """A large step, whose eps keeps rounding from deciding a direction."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4, weight_decay=0.1)


def rank_of(
    transport: Transport,
    stage: int,
    model: nn.Module | None = None,
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    gathers: GatherLimits | None = None,
    micro_batches: int = 1,
    policy: dict[str, Any] | None = None,
    group: dict[str, Any] | None = None,
    joined: int = 0,
    **settings: Any,
) -> Rank:
    """Makes one ZeRO rank that trains a model without an engine.

    Args:
        transport: To the other ranks.
        stage: Of ZeRO.
        model: None: :func:`stack`.
        make: Makes the torch optimizer.
        gathers: As of the schedule; None: nothing is kept or asked for ahead.
        micro_batches: Of an update.
        policy: As of :func:`policy_of`.
        group: Fields of the :class:`BucketGroup`.
        joined: Elements up to which neighboring units share a bucket, which then stays gathered.
        **settings: Of :class:`UpdateOptions`.
    """
    model = stack() if model is None else model
    torch_optimizer = make(model)
    groups = Groups.of(replace(BucketGroup.over(transport), **(group or {})))
    placement = Placement.of_stage(stage)
    memory = {Tier.DEVICE: Memory(CPU)}
    options = RuntimeOptions(
        placement=placement,
        layout=Limits(persistence=joined, joined=max(joined, 1), unit=10**6),
        gathers=gathers or GatherLimits(prefetch=0, max_live=0, max_reuse_distance=0),
        reduction=policy_of(stage, **(policy or {})),
        granularity=0,
        compute_dtype=lambda _name, parameter: parameter.dtype,
        whole_tensors=False,
        device=CPU,
        param_memories=memory,
        master_memories=memory,
        destination=lambda tier, _memory_tracker: GradientDestination(tier),
        update=UpdateOptions({Tier.DEVICE: UpdateStrategy()}, **settings),
    )
    runtime = build_runtime(model, options, groups, torch_optimizer)
    return Rank(transport, model, runtime, _optimizer_of(runtime, micro_batches), micro_batches)


def _optimizer_of(runtime: ZeroRuntime, micro_batches: int) -> DeepSpeedZeroOptimizer:
    """The optimizer of an engine, without the engine; gradients that nothing has announced are errors."""
    unused: Any = None
    step = TrainStep(
        runtime,
        Batches(BatchSizes(micro_batches, 1, micro_batches), 1, is_counted=True),
        LossScaling(None),
        unused,
        precision=unused,
        hooks=EngineHooks(),
        is_scheduled=True,
    )
    runtime.passes.attach(unused)
    return DeepSpeedZeroOptimizer(runtime, step, unused)


def reference(
    ranks: int, losses: Callable[[nn.Module, int, int], Sequence[torch.Tensor]], steps: int, *, clip: float = 0.0
) -> dict[str, torch.Tensor]:
    """The parameters after some updates in one process of plain torch.

    Args:
        ranks: Whose gradients are averaged.
        losses: Given the model, the step and the rank, one loss for each micro-batch.
        steps: Updates.
        clip: Largest norm; 0: any.
    """
    model = stack()
    optimizer = adamw(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            for loss in losses(model, step, rank):
                (loss / ranks).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
