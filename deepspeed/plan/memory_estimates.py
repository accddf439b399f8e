"""Estimates of model-state memory for ZeRO 2 and 3, under the names that older guides use; computed by the planner.

They stand for bf16 training with AdamW and leave out activations. *Model states* are compute parameters, gradients,
masters and optimizer state as they are held together, between backward and update; at stage 3 the layers that are
gathered at once come on top. The host figure includes building the model: fp32, in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.devices import Device
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.machine import Machine
from deepspeed.plan.memory import META
from deepspeed.plan.models import ModelSource, Workload, without_values
from deepspeed.plan.planner import make_plan
from deepspeed.plan.result import Request
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind

_GIB = 2**30
_FP32 = 4


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Returns the bytes of model states at ZeRO stage 2: of host memory per node (times the factor), and per device."""
    model = _ModelSizes(states_of_layers(total_params, total_params), total_params, total_params)
    place = num_gpus_per_node, num_nodes
    return _estimate(2, model, place, (cpu_offload, False, False), additional_buffer_factor)[:2]


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Returns bytes of model states at stage 3: of host memory per node (times the factor), per device, per its layers.

    ``cpu_offload_params`` needs ``cpu_offload``; ``zero_init``: the model is built under ``zero.Init``.
    """
    model = _ModelSizes(states_of_layers(total_params, largest_layer_params), total_params, largest_layer_params)
    choices = cpu_offload, cpu_offload_params, zero_init
    return _estimate(3, model, (num_gpus_per_node, num_nodes), choices, additional_buffer_factor)


class _ModelSizes(NamedTuple):
    source: ModelSource
    total: float  # parameters
    largest: float  # parameters of the largest layer


def _estimate(
    stage: int, model: _ModelSizes, place: tuple[int, int], choices: tuple[bool, bool, bool], factor: float
) -> tuple[int, int, int]:
    """Returns bytes on the host of a node, on a device, and of its gathered layers.

    ``place`` is devices per node and nodes; ``choices`` are whether optimizer states and parameters are offloaded, and
    whether the model is built under ``zero.Init``.
    """
    devices, nodes = place
    offload, offload_params, zero_init = choices
    if devices < 1 or nodes < 1:
        raise DeepSpeedConfigError(
            f"num_gpus_per_node and num_nodes: expected 1 or more of each, found {devices} and {nodes}"
        )
    zero: dict[str, Any] = {"stage": stage, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload and offload_params:
        zero["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }
    on_cpu = get_accelerator().device_name() == "cpu"
    plan = make_plan(
        Request(
            source=model.source,
            config=config,
            machine=Machine(Device("any", 1, 0.0, 0.0, 0.0, 0.0, ""), nodes, devices, 1),
            sequence_length=1,
            kind="cpu" if on_cpu else "cuda",
        ),
        compare=False,
    )
    found = plan.simulated
    transient = (StorageKind.GATHERED, StorageKind.GRADIENT_BUCKET) if nodes * devices > 1 else (StorageKind.GATHERED,)
    device = sum(n for (kind, tier), n in found.states.items() if tier is Tier.DEVICE and kind not in transient)
    host = sum(n for (_, tier), n in found.states.items() if tier is Tier.HOST) * devices
    gathered = found.kind_peaks.get((StorageKind.GATHERED, Tier.DEVICE), 0) if stage == 3 else 0
    built = model.largest if zero_init else model.total
    return int(max(host, _FP32 * built * devices) * factor), device + gathered, gathered


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates of ZeRO stage 2 for ``model``, which is left alone."""
    sizes = _ModelSizes(states_of_model(model), *count_params(model))
    _show(2, sizes, (num_gpus_per_node, num_nodes), additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of ZeRO stage 2 for a model of ``total_params`` parameters."""
    sizes = _ModelSizes(states_of_layers(total_params, total_params), total_params, total_params)
    _show(2, sizes, (num_gpus_per_node, num_nodes), additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates of ZeRO stage 3 for ``model``, which is left alone."""
    sizes = _ModelSizes(states_of_model(model), *count_params(model))
    _show(3, sizes, (num_gpus_per_node, num_nodes), additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates of ZeRO stage 3 for a model of known sizes."""
    sizes = _ModelSizes(states_of_layers(total_params, largest_layer_params), total_params, largest_layer_params)
    _show(3, sizes, (num_gpus_per_node, num_nodes), additional_buffer_factor)


def _show(stage: int, model: _ModelSizes, place: tuple[int, int], factor: float) -> None:
    devices, nodes = place
    title = (
        f"ZeRO stage {stage} model states, {model.total / 1e6:.0f}M parameters, {nodes} node(s) of {devices} device(s)"
    )
    headings = ["host per node", "per device", "offload_optimizer"]
    rows = [(True, False, False), (False, False, False)]
    if stage == 3:
        title += f", largest layer {model.largest / 1e6:.0f}M"
        headings[2:] = ["offload_param", "offload_optimizer", "zero.Init"]
        rows = [(*o, i) for o in ((True, True), (True, False), (False, False)) for i in (True, False)]
    table = Table(*headings, title=title)
    for choices in rows:
        sizes = (f"{nbytes / _GIB:.2f} GiB" for nbytes in _estimate(stage, model, place, choices, factor)[:2])
        optimizer, params = ("cpu" if is_on else "none" for is_on in choices[:2])
        words = (optimizer,) if stage == 2 else (params, optimizer, "yes" if choices[2] else "no")
        table.add_row(*sizes, *words)
    Console().print(table)


def count_params(model: torch.nn.Module) -> tuple[int, int]:
    """Returns the parameters of ``model`` and of its largest layer, shared ones counted once, sharded ones in full."""
    total = sum(_numel(parameter) for parameter in model.parameters())
    layers = (sum(_numel(p) for p in module.parameters(recurse=False)) for module in model.modules())
    return total, max(layers, default=0)


def _numel(parameter: torch.nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def states_of_layers(total: float, largest: float) -> ModelSource:
    """Returns a model of these sizes, fractions dropped; raises DeepSpeedConfigError where one is not above 0."""
    if total < 1 or largest < 1:
        raise DeepSpeedConfigError(
            f"total_params and largest_layer_params: expected 1 or more of each, found {total} and {largest}"
        )
    count, most = int(total), int(min(largest, total))
    sizes = [most] * (count // most) + ([count % most] if count % most else [])

    def build() -> Workload:
        return _workload(nn.ModuleList(nn.Linear(size, 1, bias=False, device=META) for size in sizes))

    return ModelSource(f"{count:,} parameters", build)


def states_of_model(model: nn.Module) -> ModelSource:
    """Returns the sizes of the parameters and modules of ``model``, which is not changed."""
    return ModelSource(type(model).__name__, lambda: _workload(without_values(model)))


def _workload(model: nn.Module) -> Workload:
    _only_touch_parameters(model, set())

    def inputs(_micro_batch: int, _sequence_length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.zeros((), device=META),), {}

    return Workload(model, inputs)


def _only_touch_parameters(module: nn.Module, seen: set[nn.Module]) -> None:
    """Replaces a module's forward by one that sums its parameters and calls its children in order."""
    seen.add(module)
    children = [child for child in module.children() if child not in seen]
    for child in children:
        _only_touch_parameters(child, seen)
    module.forward = _touching(module, children)  # type: ignore[method-assign]


def _touching(module: nn.Module, children: list[nn.Module]) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        for parameter in module.parameters(recurse=False):
            x = x + parameter.sum().float()
        for child in children:
            x = child(x)
        return x

    return forward
