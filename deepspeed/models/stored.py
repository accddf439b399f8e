"""Names of a Transformers model's tensors in files, and their conversion to the model's tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from deepspeed.models.adapters import base_names
from deepspeed.models.anatomy import base_prefix_of, unwrapped
from deepspeed.models.configurations import model_type_of
from deepspeed.models.tensor_rules import TensorRule, Tensors, renamings


def stored_tensors_of(model: nn.Module) -> StoredTensors | None:
    """Returns the library's rules for a model; None for other models, and before version 5 of the library."""
    if model_type_of(model) is None or not hasattr(model, "base_model_prefix"):
        return None
    try:
        return StoredTensors(model)
    except ImportError:  # before version 5 files had the names that models have
        return None


class StoredTensors:
    """The library's rules that convert tensors in files to those of one model."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.rules: list[Any] = mapping  # all rules, those of models inside the model too
        self._by_pattern = {pattern: one for one in self._converters for pattern in one.source_patterns}
        self._prefix = base_prefix_of(model)
        self._known = model.state_dict()

    def order(self, key: str) -> Any:
        """Returns the key by which tensors in files are sorted, so that parts are merged in their order."""
        from transformers.core_model_loading import dot_natural_key

        return dot_natural_key(key)

    def renamed(self, key: str) -> str:
        """Returns the name of a tensor in a file after the rules that rename, before those that merge."""
        from transformers.core_model_loading import apply_renamings

        return apply_renamings(key, self._renamings)

    def target(self, key: str) -> tuple[str, str | None] | None:
        """Returns the name of the model's tensor for one in a file, and the matched pattern; None if there is none."""
        from transformers.core_model_loading import rename_source_key

        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self._known)
        if name not in self._known and key in self._known:
            name, pattern = rename_source_key(key, [], [], self._prefix, self._known)
        return (name, pattern) if name in self._known else None

    def conversion(self, key: str, name: str, pattern: str | None) -> Any:
        """Returns a new conversion of tensors in files, the first of which is ``key``, to the tensor ``name``.

        Its ``add_tensor`` takes the tensors of the files; its ``convert`` returns the result.
        """
        from transformers.core_model_loading import WeightRenaming

        return copy.deepcopy(self._by_pattern[pattern]) if pattern else WeightRenaming(key, name)


def to_files(model: nn.Module, names: Collection[str]) -> list[TensorRule]:
    """Returns conversions from a Transformers model's tensors to those that its ``save_pretrained`` writes.

    Experts come one by one, tied tensors under the name that files have, and what the library does not save is left
    out.

    Args:
        model: The model, with values or without; PEFT may wrap it.
        names: The names of its tensors without PEFT's wrappers, tied ones once.
    """
    inner = unwrapped(model)
    stored = _names_in_files(model, inner)
    ignored = set(inner._keys_to_ignore_on_save or ())
    kept = {name: stored.get(name, name) for name in names if stored.get(name, name) not in ignored}
    try:
        from transformers.core_model_loading import WeightConverter, WeightRenaming, apply_converters, apply_renamings
    except ImportError:  # before version 5 files had the names that models have
        return renamings(names, kept)
    rules = _rules_to_files(inner)
    renaming = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name, in_files in kept.items():
        key, pattern = apply_converters(in_files, converters)
        if pattern is None:
            kept[name] = apply_renamings(in_files, renaming)
        else:
            groups.setdefault(key, []).append(in_files)
    return [*renamings(names, kept), *(TensorRule(tuple(members), _to_files(inner)) for members in groups.values())]


def _to_files(model: Any) -> Callable[[Tensors], Tensors]:
    from transformers.core_model_loading import revert_weight_conversion

    return lambda tensors: dict(revert_weight_conversion(model, tensors))


def _rules_to_files(model: Any) -> list[Any]:
    """Returns the rules that convert a model's tensors to those of files: those of its loading, reversed."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    rules = getattr(model, "_weight_conversions", None)
    if rules is None:  # it was not loaded: whether its files had a prefix is not known, and the library adds none
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        rules = [rule for rule in mapping if not isinstance(rule, PrefixChange)]
    return [rule.reverse_transform() for rule in rules[::-1]]


def _names_in_files(model: nn.Module, inner: Any) -> dict[str, str]:
    """Maps each of the names of a tied tensor to the one under which the library saves it."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    bases = base_names(model)
    owners: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if name in bases:
                owners.setdefault(id(tensor), []).append(bases[name])
    tied = [names for names in owners.values() if len(names) > 1]
    stand_ins = {name: value for names in tied for value in [torch.zeros(1)] for name in names}
    left = remove_tied_weights_from_state_dict(stand_ins, inner)
    return {name: next(kept for kept in names if kept in left) for names in tied for name in names}
