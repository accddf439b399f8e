"""PEFT's adapters: the names under which they are saved, and the weights of the base model with them merged."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.anatomy import unwrapped
from deepspeed.models.tensor_rules import TensorRule, Tensors, renamings


def adapter_names(model: Any) -> dict[str, str]:
    """Maps the names of a PEFT model's trained parameters to those that its ``save_pretrained`` writes.

    Raises:
        DeepSpeedConfigError: The model is not wrapped by PEFT.
    """
    _refuse_plain(model)
    from peft import get_peft_model_state_dict

    state = {name: torch.empty(0) for name, _ in model.named_parameters(remove_duplicate=False)}
    own = {id(value): name for name, value in state.items()}
    saved = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    return {own[id(value)]: name for name, value in saved.items()}


def _refuse_plain(model: Any) -> None:
    if not hasattr(model, "peft_config"):
        raise DeepSpeedConfigError(
            f"adapters: expected a model of peft.get_peft_model, found {type(model).__name__}; leave the argument out"
        )


@dataclass
class _AdapterTree:
    """The modules of a PEFT model, as they are named without PEFT's wrappers."""

    names: dict[str, str] = field(default_factory=dict)  # names of tensors to those in the base model
    layers: list[tuple[nn.Module, str]] = field(default_factory=list)  # modules with adapters, and their base name

    def visit(self, module: Any, path: str, base: str) -> None:
        """Adds a module and what is below it; ``path`` and ``base`` are its names with and without wrappers."""
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):  # a copy is trained instead
            active = module.active_adapters
            chosen = f"modules_to_save.{active[0]}" if active else "original_module"
            self.visit(module.get_submodule(chosen), _join(path, chosen), base)
        elif hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer"):
            self.layers.append((module, base))
        else:
            for name in (*module._parameters, *module._buffers):
                self.names[_join(path, name)] = _join(base, name)
            for name, child in module.named_children():
                self.visit(child, _join(path, name), _join(base, name))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unmerged(model: Any) -> _AdapterTree:
    base = unwrapped(model)
    path = next(name for name, module in model.named_modules() if module is base)
    found = _AdapterTree()
    found.visit(base, path, "")
    paths = {id(module): name for name, module in model.named_modules()}
    for layer, layer_base in found.layers:
        inner: Any = getattr(layer, "original_module", layer)
        while hasattr(inner, "base_layer"):
            inner = inner.base_layer
        for named in (inner.named_parameters, inner.named_buffers):
            for name, _ in named(remove_duplicate=False):
                found.names[_join(paths[id(inner)], name)] = _join(layer_base, name)
    return found


def base_names(model: Any) -> dict[str, str]:
    """Maps the names of a model's parameters and buffers, tied ones too, to those without PEFT's wrappers."""
    return _unmerged(model).names


def merge_adapters(model: Any, names: Iterable[str]) -> list[TensorRule]:
    """Returns conversions from the tensors of a PEFT model to those of its base model, as PEFT's ``merge`` makes them.

    Args:
        model: The PEFT model; its parameters may be sharded, and do not change.
        names: The names of its tensors, tied ones once.

    Raises:
        DeepSpeedConfigError: The model is not wrapped by PEFT, or has a prompt, which no weight can take in.
    """
    _refuse_plain(model)
    for config in model.peft_config.values():
        if getattr(config, "is_prompt_learning", False):
            raise DeepSpeedConfigError(
                f'adapters="merged": expected adapters that PEFT merges, found {type(config).__name__}, which adds a '
                'prompt; pass adapters="only"'
            )
    found = _unmerged(model)
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    conversions: list[TensorRule] = []
    taken: set[str] = set()
    for layers in _sharing(found.layers):
        inputs = tuple(dict.fromkeys(own[id(parameter)] for layer, _ in layers for parameter in layer.parameters()))
        taken.update(inputs)
        conversions.append(TensorRule(inputs, _MergeRule(layers, own)))
    return conversions + renamings((name for name in names if name not in taken), found.names)


def _sharing(layers: list[tuple[nn.Module, str]]) -> Iterator[list[tuple[nn.Module, str]]]:
    """Yields the layers in groups that share parameters (an embedding and a head that are tied)."""
    groups: list[tuple[set[int], list[tuple[nn.Module, str]]]] = []
    for layer in layers:
        used, members = {id(parameter) for parameter in layer[0].parameters()}, [layer]
        for group in [group for group in groups if group[0] & used]:
            groups.remove(group)
            used, members = used | group[0], group[1] + members
        groups.append((used, members))
    for _, members in groups:
        yield members


class _MergeRule:
    """Merges the adapters of some layers into copies of their weights.

    PEFT merges in place. So it is given copies of the layers' modules whose parameters are copies of the tensors.
    """

    def __init__(self, layers: list[tuple[nn.Module, str]], names: dict[int, str]) -> None:
        self._layers = layers
        self._names = names  # of all parameters, by id

    def __call__(self, tensors: Tensors) -> Tensors:
        """Returns the weights of the layers under their names in the base model; on ``meta`` without merging."""
        is_merged = all(tensor.device.type != "meta" for tensor in tensors.values())
        parameters = {  # what was gathered is freed as it is copied
            name: nn.Parameter(tensors.pop(name).detach().clone(), requires_grad=False) for name in list(tensors)
        }
        found: Tensors = {}
        given: set[int] = set()
        with torch.no_grad():
            for layer, base in self._layers:
                copied: Any = self._copy(layer, parameters)
                if hasattr(copied, "unload_and_optionally_merge_module"):
                    inner = copied.unload_and_optionally_merge_module(
                        merge=is_merged, safe_merge=False, adapter_names=None
                    )
                else:
                    if is_merged:
                        copied.merge()
                    inner = copied.get_base_layer()
                for name, parameter in inner.named_parameters():
                    if id(parameter) not in given:
                        given.add(id(parameter))
                        found[_join(base, name)] = parameter.data
        return found

    def _copy(self, module: nn.Module, parameters: dict[str, nn.Parameter]) -> nn.Module:
        """Returns a copy of a module and those below it with other parameters, without hooks."""
        made = type(module).__new__(type(module))
        for key, value in vars(module).items():
            if key.endswith("hooks") and isinstance(value, OrderedDict):
                value = OrderedDict()
            made.__dict__[key] = value.copy() if isinstance(value, (dict, list, set)) else value
        made._parameters = {
            name: None if parameter is None else parameters[self._names[id(parameter)]]
            for name, parameter in module._parameters.items()
        }
        made._modules = {
            name: None if child is None else self._copy(child, parameters) for name, child in module._modules.items()
        }
        return made
