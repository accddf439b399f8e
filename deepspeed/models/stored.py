"""Names of a Transformers model's tensors in files, and their conversion to the model's tensors."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from deepspeed.models.anatomy import base_prefix_of
from deepspeed.models.configurations import model_type_of


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

        name: str = apply_renamings(key, self._renamings)
        return name

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
