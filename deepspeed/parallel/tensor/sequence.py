"""Sequence parallelism within tensor parallelism: norms and residual sums work on a part of the sequence.

Before a region (an attention or an MLP) the positions of all ranks are gathered; after it a reduce-scatter
leaves each rank its positions (`Korthikanti et al. <https://arxiv.org/abs/2205.05198>`_, section 4.2).
A gather and a reduce-scatter carry as many bytes as the all-reduce that they replace. Activations between regions are
held once instead of on every rank; gradients of its parameters are sums over positions, so they are summed over the
ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.differentiable import gather_from, reduce_scatter_to, scatter_to
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.parallel.stages import is_pipeline
from deepspeed.parallel.tensor.layout import Layout, block_of
from deepspeed.parallel.tensor.linear import CutLinear
from deepspeed.parallel.tensor.making import sum_own_gradients
from deepspeed.parallel.tensor.rules import CutStyle
from deepspeed.uncompiled import uncompiled

_KEY = "tensor_parallel.sequence_parallel_norms"
_ARGUMENTS = ("hidden_states", "x", "input")
_DIM = 1
"""Of the sequence, in (batch, sequence, width)."""


@dataclass
class CutSequence:
    """The cut of activations along the sequence, between the regions of one model."""

    channel: Channel
    # activations are cut now; False in an evaluation whose length is not divisible by the number of ranks
    is_cut: bool = True
    must_divide: bool = False  # evaluations must be cut too: pipeline stages cannot see each other's ``is_cut``

    @uncompiled
    def split(self, values: torch.Tensor) -> torch.Tensor:
        """Returns this rank's positions, ``[batch, S / ranks, width]`` of ``[batch, S, width]``.

        Also sets :attr:`is_cut` for the blocks that follow. In an evaluation whose S is not divisible by the
        number of ranks it is False, and ``values`` is returned whole.

        Raises:
            DeepSpeedConfigError: ``values`` is not 3-D, or the ranks do not divide S in training or in a pipeline.
        """
        size = self.channel.size
        if values.dim() != 3:
            raise DeepSpeedConfigError(
                f"{_KEY}: the first block takes activations of shape {tuple(values.shape)}; expected (batch, sequence, "
                "width). Leave the key out"
            )
        self.is_cut = self.must_divide or torch.is_grad_enabled() or values.shape[_DIM] % size == 0
        if not self.is_cut:
            return values
        if values.shape[_DIM] % size:
            raise DeepSpeedConfigError(
                f"{_KEY}: a sequence has {values.shape[_DIM]} positions, which {size} ranks do not divide; pad batches "
                f"to a multiple of {size} (pad_to_multiple_of of a collator), or leave the key out"
            )
        return scatter_to(values, self.channel, _DIM)

    @uncompiled
    def gather(self, values: torch.Tensor, *, is_partial: bool) -> torch.Tensor:
        """Gathers the positions of all ranks: ``[batch, S / ranks, width]`` to ``[batch, S, width]``.

        With ``is_partial`` the ranks' gradients are partial sums, as behind cut layers; backward sums them.

        Raises:
            DeepSpeedConfigError: ``values`` is not 3-D.
        """
        if not self.is_cut:
            return values
        if values.dim() != 3:
            raise DeepSpeedConfigError(
                f"{_KEY}: a cut region takes activations of shape {tuple(values.shape)}; expected (batch, positions of "
                "this rank, width). Leave the key out"
            )
        return gather_from(values, self.channel, _DIM, is_partial=is_partial)

    def leave(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, then returns this rank's positions.

        Reduce-scatter from ``[batch, S, width]`` to ``[batch, S / ranks, width]``.
        """
        return reduce_scatter_to(values, self.channel, _DIM)


@dataclass
class ScatterPlan:
    """Names the modules that change when activations are cut along the sequence."""

    first: str | None  # name of the first block; None: it lies on another stage
    last: str | None  # name of the last block, as ``first``
    is_of_stages: bool = False  # the blocks are layers of a pipeline
    regions: list[str] = field(default_factory=list)  # names of modules whose input is gathered
    columns: list[str] = field(default_factory=list)  # names of column-parallel layers in them
    rows: list[str] = field(default_factory=list)  # names of row-parallel layers
    # names of modules with parameters that work on a part of the sequence
    between: list[str] = field(default_factory=list)


def plan_of(model: nn.Module, layout: Layout) -> ScatterPlan:
    """Determines where the sequence is cut, in a model that is cut by ``layout``. Changes nothing.

    Raises:
        DeepSpeedConfigError: The model's blocks do not allow it.
    """
    ways = {layer.name: layer.way for layer in layout.layers}
    rows = [name for name, way in ways.items() if way is CutStyle.ROW]
    columns = [name for name, way in ways.items() if way is CutStyle.COLUMN]
    modules = {name for name, _ in model.named_modules()}
    for name in (*rows, *columns):
        if name not in modules:
            raise _refused(
                f"{name!r} is a stack of weights, whose tokens are routed before it; only linear layers are cut"
            )
    if is_pipeline(model):
        plan, roots = _blocks_of_stage(model, rows)
    else:
        plan, roots = _blocks_of(model, rows)
    prefixes = tuple(f"{root}." for root in roots)
    columns = [name for name in columns if name.startswith(prefixes)]
    for row in rows:
        block = row.partition(".")[0] if plan.is_of_stages else block_of(row)
        # The region is the innermost module with the row-parallel layer and the column-parallel ones that feed it.
        region = row.rpartition(".")[0]
        while len(region) > len(block) and not any(name.startswith(f"{region}.") for name in columns):
            region = region.rpartition(".")[0]
        if region == block:
            raise _refused(
                f"the layers that feed {row!r} are no module by themselves, apart from their block {block!r}"
            )
        if region not in plan.regions:
            plan.regions.append(region)
    inside = tuple(f"{region}." for region in plan.regions) or ("\0",)
    plan.columns = [name for name in columns if f"{name}.".startswith(inside)]
    known = set(layout.parameters) | {f"{row}.bias" for row in plan.rows}
    summed = tuple(f"{name}." for name, way in ways.items() if way is CutStyle.SUMMED) or ("\0",)
    for name, _ in model.named_parameters(remove_duplicate=False):
        # A whole parameter inside a region would see the whole sequence on every rank.
        if name.startswith(inside) and name not in known and not name.startswith(summed):
            raise _refused(f"the parameter {name!r} is whole on every rank and works between layers that are cut")
    for root in roots:
        for name, module in model.get_submodule(root).named_modules(prefix=root):
            own = any(True for _ in module.parameters(recurse=False))
            if own and not f"{name}.".startswith(inside):
                plan.between.append(name)
    return plan


def _blocks_of(model: nn.Module, rows: list[str]) -> tuple[ScatterPlan, list[str]]:
    """Returns a plan without regions, and the names of the modules that contain layers between regions."""
    blocks = list(dict.fromkeys(block_of(name) for name in rows))
    stacks = {block.rpartition(".")[0] for block in blocks}
    numbers = [int(found[0]) for block in blocks if (found := re.search(r"\d+$", block))]
    if len(stacks) != 1 or len(numbers) != len(blocks):
        raise _refused(
            f"the model has its row-parallel layers in {sorted(stacks)}, where one stack of blocks is needed"
        )
    (stack,) = stacks
    count = len(list(model.get_submodule(stack).children()))
    if sorted(numbers) != list(range(count)):
        raise _refused(f"of the {count} blocks of {stack!r} only {sorted(numbers)} have layers that are cut")
    return ScatterPlan(f"{stack}.0", f"{stack}.{count - 1}", rows=rows), [stack]


def _blocks_of_stage(model: Any, rows: list[str]) -> tuple[ScatterPlan, list[str]]:
    """Returns the same for a pipeline stage. All stages know which layers are blocks, but not where others cut."""
    blocks = model.run_of_blocks()
    mine = [number for number in blocks if str(number) in model.fwd_map]
    cut = sorted({int(name.partition(".")[0]) for name in rows if name.partition(".")[0].isdigit()})
    if cut != mine or len(rows) != sum(name.partition(".")[0].isdigit() for name in rows):
        raise _refused(
            f"the layers {blocks.start} to {blocks.stop - 1} of the pipeline are its blocks, as the longest run of one "
            f"class, of which this stage has {mine}; expected row-parallel layers in each of them and nowhere else, "
            f"found them in {sorted({name.partition('.')[0] for name in rows})}"
        )
    first, last = (str(number) if number in mine else None for number in (blocks.start, blocks.stop - 1))
    return ScatterPlan(first, last, is_of_stages=True, rows=rows), [str(number) for number in mine]


def _refused(why: str) -> DeepSpeedConfigError:
    return DeepSpeedConfigError(f"{_KEY}: {why}; leave the key out")


def cut_sequences(model: nn.Module, plan: ScatterPlan, channel: Channel) -> None:
    """Changes the modules of a plan (of :func:`plan_of`), whose layers have been cut."""
    cut = CutSequence(channel, must_divide=plan.is_of_stages)
    if plan.first is not None:
        model.get_submodule(plan.first).register_forward_pre_hook(_on_input(cut.split), with_kwargs=True)

    def gather(values: torch.Tensor) -> torch.Tensor:
        return cut.gather(values, is_partial=True)

    for name in plan.regions:
        model.get_submodule(name).register_forward_pre_hook(_on_input(gather), with_kwargs=True)
    for name in (*plan.columns, *plan.rows):
        settings: CutLinear = model.get_submodule(name).tensor_cut  # type: ignore[assignment]
        settings.sequence = cut
    for name in plan.between:
        sum_own_gradients(model.get_submodule(name), channel, name)

    def gather_output(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return cut.gather(output, is_partial=False)
        return (cut.gather(output[0], is_partial=False), *output[1:])

    if plan.last is not None:
        model.get_submodule(plan.last).register_forward_hook(gather_output)
    log_dist(f"{_KEY}: between the first block and the last each of {channel.size} ranks has a part of the sequence")


def _on_input(change: Any) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            first = args[0]
            changed = (change(first[0]), *first[1:]) if isinstance(first, tuple) else change(first)
            return (changed, *args[1:]), kwargs
        name = next((name for name in _ARGUMENTS if isinstance(kwargs.get(name), torch.Tensor)), None)
        if name is None:
            raise _refused(f"a module is called with {', '.join(kwargs)}, none of which is known as its input")
        return args, {**kwargs, name: change(kwargs[name])}

    return hook
