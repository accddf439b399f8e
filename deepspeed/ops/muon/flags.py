"""Determines which parameters Muon treats as matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_EXCLUDED = ("embed", "lm_head")

CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
"""Modules whose ``weight`` is the kernel of a convolution."""


def is_matrix_parameter(name: str, param: Tensor) -> bool:
    """Returns whether Muon orthogonalizes a parameter: by its true shape 2-D or more, no embedding or output layer.

    Biases of stacked experts have two dimensions but are not matrices.
    """
    shape = getattr(param, "ds_shape", param.shape)
    lowered = name.lower()
    if lowered.rpartition(".")[2].endswith("bias"):
        return False
    return len(shape) >= 2 and not any(part in lowered for part in _EXCLUDED)


def is_stack_of_matrices(param: Tensor) -> bool:
    """Returns whether a parameter, by its true shape, is a stack of matrices, as with stacked experts.

    Its attribute ``muon_stacked`` determines it. Without it, a parameter of three dimensions is a stack, and one of
    more is a convolution kernel.
    """
    dims = len(getattr(param, "ds_shape", param.shape))
    return dims >= 3 and bool(getattr(param, "muon_stacked", dims == 3))


def mark_convolutions(model: nn.Module) -> None:
    """Sets ``muon_stacked`` to false on kernels of torch's convolutions, unless the program has set it."""
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS) and not hasattr(module.weight, "muon_stacked"):
            module.weight.muon_stacked = False  # type: ignore[attr-defined]


def set_optimizer_flags(config_class: Any, model: nn.Module) -> None:
    """Sets ``use_muon`` on ``model``'s trainable parameters if the config (dict or object) has optimizer Muon.

    Kernels of torch's convolutions also get ``muon_stacked`` false, because parameters of three dimensions are
    otherwise stacks of matrices. For a pipeline of a Transformers model, the parameter names of that model are used,
    because those of the pipeline do not identify embeddings.
    """
    name = _optimizer_name(config_class)
    if name is None or name.lower() != "muon":
        return
    mark_convolutions(model)
    names: dict[str, str] = getattr(model, "names_in_transformers", dict)()
    for param_name, param in model.named_parameters():
        if param.requires_grad:
            prefix = next((prefix for prefix in names if param_name.startswith(prefix)), None)
            name = param_name if prefix is None else names[prefix] + param_name.removeprefix(prefix)
            param.use_muon = is_matrix_parameter(name, param)  # type: ignore[attr-defined]


def _optimizer_name(config: Any) -> str | None:
    if isinstance(config, dict):
        section = config.get("optimizer") or {}
        return section.get("type")
    if hasattr(config, "optimizer_name"):
        return config.optimizer_name
    section = getattr(config, "root", config).optimizer
    return None if section is None else section.type
