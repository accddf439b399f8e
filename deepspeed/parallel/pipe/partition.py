"""Divides layers over stages, or over chunks of stages. Plain arithmetic on numbers per layer.

The cost of each layer is counted in one run of all layers without values, or estimated by size.

Time is that of the arithmetic and of the memory that a layer touches, in bytes of traffic: a device does some hundred
operations while it moves a byte, so a product of matrices counts by its operations, a norm or a loss by its tensors.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from deepspeed.attention_products import OPERATIONS_OF_ATTENTION
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.partition import partition_balanced, partition_uniform
from deepspeed.parallel.pipe.cut import LayerCost
from deepspeed.parallel.pipe.spec import Entry, LayerSpec, TiedLayerSpec, built_on_meta, class_name, trainable_numel
from deepspeed.parallel.pipe.stage_layers import run_collecting, split_losses
from deepspeed.parallel.pipe.values import map_tensors, tensors_of
from deepspeed.zero.address import full_shape
from deepspeed.zero.construction.modules import suspended

Method = str | Sequence[int]


def chunk_bounds(method: Method, parameters: Sequence[int], names: Sequence[str], parts: int) -> list[int]:
    """Cuts a row of layers into parts; returns ``parts + 1`` bounds. No part is empty.

    Args:
        method: ``uniform``: as many layers each. ``parameters``: as many trainable elements each. ``type:regex``: as
            many layers each whose class name the expression is found in, whatever the case; ``type:a=2,b=1`` gives
            kinds a weight. Or the bounds themselves. (``plan`` is found by ``cut``.)
        parameters: Trainable elements of each layer.
        names: Class name of each layer.

    Raises:
        DeepSpeedConfigError: There are fewer layers than parts, nothing matches, or the bounds given are none.
    """
    layers = len(names)
    if layers < parts:
        raise DeepSpeedConfigError(
            f"PipelineModule: {layers} layers cannot be cut into {parts} parts (stages x chunks per stage) without an "
            "empty one; use fewer stages or chunks, or more layers"
        )
    if not isinstance(method, str):
        return _given(list(method), layers, parts)
    kind, _, expression = method.partition(":")
    kind = kind.strip().lower()
    if kind == "uniform":
        return partition_uniform(layers, parts)
    if kind == "parameters":
        return balanced(parameters, parts)
    if kind == "type" and expression:
        return balanced(_weights(expression, names), parts)
    raise DeepSpeedConfigError(
        f"PipelineModule(partition_method={method!r}): expected 'uniform', 'parameters', 'plan', 'type:regex', or a "
        "list of bounds"
    )


def is_plan(method: Method | None) -> bool:
    """Returns whether the cut is to be the one with the least step time."""
    return isinstance(method, str) and method.strip().lower() == "plan"


def _given(bounds: list[int], layers: int, parts: int) -> list[int]:
    fits = len(bounds) == parts + 1 and bounds[0] == 0 and bounds[-1] == layers
    if not fits or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise DeepSpeedConfigError(
            f"PipelineModule(partition_method={bounds}): expected {parts + 1} bounds that begin with 0, end with the "
            f"number of layers, {layers}, and rise, so that no part is empty"
        )
    return bounds


def _weights(expression: str, names: Sequence[str]) -> list[float]:
    kinds: list[tuple[str, float]] = []
    if "=" in expression:
        for entry in expression.split(","):
            pattern, _, weight = entry.rpartition("=")
            kinds.append((pattern, float(weight)))
    else:
        kinds.append((expression, 1.0))
    weights = [sum(weight for pattern, weight in kinds if re.search(pattern, name, re.IGNORECASE)) for name in names]
    if not any(weights):
        raise DeepSpeedConfigError(
            f"PipelineModule(partition_method='type:{expression}'): no layer's class name matches; the layers are "
            f"{', '.join(dict.fromkeys(names))}"
        )
    return weights


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Returns the parts whose weights differ little; none is empty, though many layers may weigh nothing."""
    bounds = partition_balanced(weights, parts)
    # Bounds are moved as little as needed, so that every part has a layer.
    moved = list(bounds)
    for part in range(1, len(moved) - 1):
        moved[part] = max(moved[part], moved[part - 1] + 1)
    for part in range(len(moved) - 2, 0, -1):
        moved[part] = min(moved[part], len(weights) - (len(moved) - 1 - part))
    return moved


_OPERATIONS_PER_BYTE = 100
_STATE_BYTES = 16  # per trained element: weight, gradient, master and two moments, about


def costs_by_size(entries: Sequence[Entry], *, with_loss: bool) -> tuple[list[LayerCost], LayerCost | None]:
    """Returns costs by trainable elements, where nothing is known of the inputs: each is multiplied by once.

    The cost of a loss function is estimated as an eighth of the largest layer's.
    """
    numels = [trainable_numel(entry) for entry in entries]
    costs = [LayerCost(n + 1.0, 2.0 * (n + 1), n + 1.0, state=_STATE_BYTES * n) for n in numels]
    loss = max(numels) / 8
    return costs, LayerCost(loss, 2 * loss) if with_loss else None


def counted_costs(
    entries: Sequence[Entry], loss_fn: Callable[..., Any] | None, sample: tuple[Any, Any]
) -> tuple[list[LayerCost], LayerCost | None]:
    """Returns the cost of each layer and that of the loss, counted while they run forward and backward without values.

    Nothing of the layers' size is allocated. ``loss_fn`` and ``sample`` are those of the pipeline module.

    Raises:
        DeepSpeedConfigError: A layer needs values, or does not take what the one before gives.
    """
    costs: list[LayerCost] = []
    tied: dict[str, nn.Module] = {}
    where = "the sample"
    try:
        with torch.device("meta"), _AnswerMode(), suspended(), torch.random.fork_rng(devices=[]):
            inputs, labels = map_tensors(tuple(sample), _without_value)
            value = inputs
            for number, entry in enumerate(entries):
                where = f"layer {number} ({class_name(entry)})"
                run, module = _callable(entry, tied)
                cost, value = _counted(functools.partial(run_collecting, run), value, module)
                costs.append(cost)
            value, _ = split_losses(value)
            if loss_fn is None:
                return costs, None
            where = "the loss function"
            loss, _ = _counted(lambda outputs: loss_fn(outputs, labels), value, None)
            return costs, loss
    except DeepSpeedConfigError:
        raise
    except Exception as error:  # whatever the layer's own code raises
        raise DeepSpeedConfigError(
            f"PipelineModule(partition_method='plan', sample=...): {where} cannot be run without values "
            f"({type(error).__name__}: {error}); correct the sample, which is (inputs, labels) of one micro-batch, or "
            "leave it out: then layers count by their elements"
        ) from error


class _AnswerMode(TorchDispatchMode):
    """Replaces values that a layer reads: numbers are 1, and tests whether a mask is all true are true."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


def _without_value(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _callable(entry: Entry, tied: dict[str, nn.Module]) -> tuple[Callable[[Any], Any], nn.Module | None]:
    """Returns a function that runs the layer, and its module, without values."""
    if isinstance(entry, TiedLayerSpec) and entry.key in tied:
        module = tied[entry.key]
    else:
        built: Any = built_on_meta(entry) or entry.build() if isinstance(entry, LayerSpec) else entry
        if not isinstance(built, nn.Module):
            return built, None
        memo: dict[int, Any] = {}
        for parameter in built.parameters():
            empty = torch.empty(full_shape(parameter), dtype=parameter.dtype, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in built.buffers():
            memo[id(buffer)] = _without_value(buffer)
        module = copy.deepcopy(built, memo)
    if not isinstance(entry, TiedLayerSpec):
        return module, module
    tied[entry.key] = module
    forward = entry.forward_fn
    return (module if forward is None else lambda value: forward(module, value)), module


def _counted(run: Callable[[Any], Any], value: Any, module: nn.Module | None) -> tuple[LayerCost, Any]:
    """Returns the cost of one call, and its outputs."""
    parameters = list(module.parameters()) if module is not None else []
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    given = tensors_of(value)
    kept: dict[int, torch.Tensor] = {}  # tensors that live until the backward, one per storage
    own = {_storage(parameter) for parameter in parameters}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in own:
            kept[_storage(tensor)] = tensor
        return tensor

    with _operations() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        outputs = run(value)
    if isinstance(outputs, tuple) and module is None and len(outputs) == 2 and isinstance(outputs[1], dict):
        outputs = outputs[0]  # a loss with metrics
    made = tensors_of(outputs)
    for tensor in given:
        keep(tensor)
    wanted = [tensor for tensor in (*given, *trained) if tensor.requires_grad]
    roots = [tensor for tensor in made if tensor.requires_grad and tensor.grad_fn is not None]
    with _operations() as backward:
        if roots and wanted:
            torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)
    held = sum(tensor.nbytes for tensor in kept.values())
    touched = held + sum(tensor.nbytes for tensor in (*parameters, *made))
    time = forward.get_total_flops() / _OPERATIONS_PER_BYTE + touched
    back = backward.get_total_flops() / _OPERATIONS_PER_BYTE + 2.0 * touched if roots else 0.0
    state = sum(_STATE_BYTES * p.numel() if p.requires_grad else p.nbytes for p in parameters)
    following = map_tensors(outputs, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
    return LayerCost(time, back, back / 2 if trained else 0.0, state, held), following


def _operations() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=OPERATIONS_OF_ATTENTION)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
