"""Estimates of model-state memory for ZeRO 2 and 3, under the names that older guides use; computed by the planner.

They stand for bf16 training with AdamW and leave out activations. *Model states* are compute parameters, gradients,
masters and optimizer state as they are held together, between backward and update; at stage 3 the layers that are
gathered at once come on top. The host figure includes building the model: fp32, in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    source = states_of_layers(total_params, total_params)
    return _zero2(source, total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor)


def _zero2(
    source: ModelSource, total: float, devices: int, nodes: int, cpu_offload: bool, factor: float
) -> tuple[int, int]:
    host, device, _ = _states(source, _config(2, "cpu" if cpu_offload else "none", "none"), devices, nodes)
    return int(max(host, _FP32 * total * devices) * factor), device


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
    source = states_of_layers(total_params, largest_layer_params)
    return _zero3(
        source,
        (total_params, largest_layer_params),
        num_gpus_per_node,
        num_nodes,
        (cpu_offload, cpu_offload_params, zero_init),
        additional_buffer_factor,
    )


def _zero3(
    source: ModelSource,
    sizes: tuple[float, float],
    devices: int,
    nodes: int,
    choices: tuple[bool, bool, bool],
    factor: float,
) -> tuple[int, int, int]:
    total, largest = sizes
    cpu_offload, cpu_offload_params, zero_init = choices
    config = _config(3, "cpu" if cpu_offload else "none", "cpu" if cpu_offload and cpu_offload_params else "none")
    host, device, gathered = _states(source, config, devices, nodes)
    built = largest if zero_init else total
    return int(max(host, _FP32 * built * devices) * factor), device + gathered, gathered


def _config(stage: int, optimizer: str, params: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    if optimizer != "none":
        zero["offload_optimizer"] = {"device": optimizer}
    if params != "none":
        zero["offload_param"] = {"device": params}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }


def _states(source: ModelSource, config: dict[str, Any], devices: int, nodes: int) -> tuple[int, int, int]:
    """Returns (host bytes per node, device bytes, device bytes of gathered layers)."""
    if devices < 1 or nodes < 1:
        raise DeepSpeedConfigError(
            f"num_gpus_per_node and num_nodes: expected 1 or more of each, found {devices} and {nodes}"
        )
    on_cpu = get_accelerator().device_name() == "cpu"
    plan = make_plan(
        Request(
            source=source,
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
    host = sum(n for (_, tier), n in found.states.items() if tier is Tier.HOST)
    return host * devices, device, found.kind_peaks.get((StorageKind.GATHERED, Tier.DEVICE), 0)


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates of ZeRO stage 2 for ``model``, which is left alone."""
    total, _ = count_params(model)
    _show_zero2(states_of_model(model), total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of ZeRO stage 2 for a model of ``total_params`` parameters."""
    source = states_of_layers(total_params, total_params)
    _show_zero2(source, total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)


def _show_zero2(source: ModelSource, total: float, devices: int, nodes: int, factor: float) -> None:
    table = Table("host per node", "per device", "offload_optimizer", title=_title(2, total, nodes, devices))
    for offload in (True, False):
        host, device = _zero2(source, total, devices, nodes, offload, factor)
        table.add_row(_gib(host), _gib(device), "cpu" if offload else "none")
    Console().print(table)


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates of ZeRO stage 3 for ``model``, which is left alone."""
    _show_zero3(states_of_model(model), count_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates of ZeRO stage 3 for a model of known sizes."""
    source = states_of_layers(total_params, largest_layer_params)
    _show_zero3(source, (total_params, largest_layer_params), num_gpus_per_node, num_nodes, additional_buffer_factor)


def _show_zero3(source: ModelSource, sizes: tuple[float, float], devices: int, nodes: int, factor: float) -> None:
    table = Table(
        "host per node",
        "per device",
        "offload_param",
        "offload_optimizer",
        "zero.Init",
        title=_title(3, sizes[0], nodes, devices) + f", largest layer {sizes[1] / 1e6:.0f}M",
    )
    for offload, offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = _zero3(source, sizes, devices, nodes, (offload, offload_params, zero_init), factor)
            words = ("cpu" if offload_params else "none", "cpu" if offload else "none", "yes" if zero_init else "no")
            table.add_row(_gib(host), _gib(device), *words)
    Console().print(table)


def count_params(model: torch.nn.Module) -> tuple[int, int]:
    """Returns the parameters of ``model`` and of its largest layer, shared ones counted once, sharded ones in full."""
    total = sum(_numel(parameter) for parameter in model.parameters())
    layers = (sum(_numel(p) for p in module.parameters(recurse=False)) for module in model.modules())
    return total, max(layers, default=0)


def _numel(parameter: torch.nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _title(stage: int, total_params: float, num_nodes: int, devices: int) -> str:
    return (
        f"ZeRO stage {stage} model states, {total_params / 1e6:.0f}M parameters, {num_nodes} node(s) of {devices} "
        "device(s)"
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _layers(total: int, largest: int) -> nn.Module:
    """Returns a model of one layer of a given size and the rest in layers of at most that size."""
    sizes = [largest] * (total // largest) + ([total % largest] if total % largest else [])
    return nn.ModuleList(nn.Linear(size, 1, bias=False, device=META) for size in sizes)


def states_of_layers(total: float, largest: float) -> ModelSource:
    """Returns the sizes of a model of ``total`` parameters whose largest layer has ``largest``.

    Programs write both as ``2851e6``, so fractions are dropped.

    Raises:
        DeepSpeedConfigError: A size is not above 0.
    """
    if total < 1 or largest < 1:
        raise DeepSpeedConfigError(
            f"total_params and largest_layer_params: expected 1 or more of each, found {total} and {largest}"
        )
    count, most = int(total), int(min(largest, total))
    return ModelSource(f"{count:,} parameters", lambda: _workload(_layers(count, most)))


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
