"""Which parameters Muon treats as matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_EXCLUDED = ("embed", "lm_head")


def is_matrix_parameter(name: str, param: Tensor) -> bool:
    """Returns whether Muon orthogonalises a parameter's update: two dimensions or more, no embedding or output layer.

    Args:
        name: Qualified name.
        param: The parameter; while it is sharded its true shape is ``ds_shape``.
    """
    shape = getattr(param, "ds_shape", param.shape)
    return len(shape) >= 2 and not any(part in name.lower() for part in _EXCLUDED)


def set_optimizer_flags(config_class: Any, model: nn.Module) -> None:
    """Sets ``use_muon`` on every trainable parameter of ``model``, if the config's optimizer is Muon.

    Args:
        config_class: The config: its dict, or an object that has ``optimizer_name`` or ``root.optimizer``.
        model: The model.
    """
    name = _optimizer_name(config_class)
    if name is None or name.lower() != "muon":
        return
    for param_name, param in model.named_parameters():
        if param.requires_grad:
            param.use_muon = is_matrix_parameter(param_name, param)  # type: ignore[attr-defined]


def _optimizer_name(config: Any) -> str | None:
    if isinstance(config, dict):
        section = config.get("optimizer") or {}
        return section.get("type")
    if hasattr(config, "optimizer_name"):
        return config.optimizer_name
    section = getattr(config, "root", config).optimizer
    return None if section is None else section.type
