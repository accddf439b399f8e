"""The rule-of-thumb estimates of model-state memory for ZeRO 2 and 3, under the names that older guides use.

P parameters, L of them in the largest layer, g devices on each of N nodes, G = N*g, b a buffer factor. They assume
mixed precision with Adam (2 + 2 + 4 + 4 + 4 bytes per parameter and a little more) and leave out activations; what this
package itself holds is stated in its placement formula, not here.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

_GIB = 2**30


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of model states at ZeRO stage 2.

    Args:
        total_params: P.
        num_gpus_per_node: g.
        num_nodes: N.
        cpu_offload: Whether optimizer states live in host memory.
        additional_buffer_factor: b.

    Returns:
        (bytes of host memory per node, bytes per device).
    """
    devices = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * devices, 16) * additional_buffer_factor), 2 * total_params
    host = int(total_params * 4 * num_gpus_per_node * additional_buffer_factor)
    return host, 2 * total_params + int(18 * total_params / devices)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of model states at ZeRO stage 3.

    Args:
        total_params: P.
        largest_layer_params: L.
        num_gpus_per_node: g.
        num_nodes: N.
        cpu_offload: Whether optimizer states live in host memory.
        cpu_offload_params: Whether the parameters do too.
        zero_init: Whether the model is built under ``zero.Init``.
        additional_buffer_factor: b.

    Returns:
        (bytes of host memory per node, bytes per device, bytes of the largest layer on each device).
    """
    devices = num_nodes * num_gpus_per_node
    largest = 4 * largest_layer_params
    if not cpu_offload:
        per_device = largest + int(18 * total_params / devices)
        built = largest_layer_params if zero_init else total_params
        host = built * 4 * num_gpus_per_node * additional_buffer_factor
        return int(host), per_device, largest
    per_parameter = 18 if cpu_offload_params else 16
    per_device = largest if cpu_offload_params else largest + int(2 * total_params / devices)
    if zero_init:
        host = total_params * per_parameter / num_nodes * additional_buffer_factor
    else:
        host = total_params * max(4 * num_gpus_per_node, per_parameter / num_nodes) * additional_buffer_factor
    return int(host), per_device, largest


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates of ZeRO stage 2 for ``model``."""
    total, _ = count_params(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of ZeRO stage 2 for a model of ``total_params`` parameters."""
    table = Table("host per node", "per device", "offload_optimizer", title=_title(2, total_params, num_nodes))
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        table.add_row(_gib(host), _gib(device), "cpu" if offload else "none")
    Console().print(table)


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates of ZeRO stage 3 for ``model``."""
    total, largest = count_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates of ZeRO stage 3 for a model of known sizes."""
    table = Table(
        "host per node",
        "per device",
        "offload_param",
        "offload_optimizer",
        "zero.Init",
        title=_title(3, total_params, num_nodes) + f", largest layer {largest_layer_params / 1e6:.0f}M",
    )
    for offload, offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                offload,
                offload_params,
                zero_init,
                additional_buffer_factor,
            )
            words = ("cpu" if offload_params else "none", "cpu" if offload else "none", "yes" if zero_init else "no")
            table.add_row(_gib(host), _gib(device), *words)
    Console().print(table)


def count_params(model: torch.nn.Module) -> tuple[int, int]:
    """(parameters of ``model``, those of its largest layer), shared ones counted once and sharded ones in full."""
    total = sum(_numel(parameter) for parameter in model.parameters())
    layers = (sum(_numel(p) for p in module.parameters(recurse=False)) for module in model.modules())
    return total, max(layers, default=0)


def _numel(parameter: torch.nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _title(stage: int, total_params: int, num_nodes: int) -> str:
    return f"ZeRO stage {stage} model states, {total_params / 1e6:.0f}M parameters, {num_nodes} node(s)"


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
