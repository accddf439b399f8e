"""Replaces the loader by which Transformers loads files into a model at ZeRO stage 3; nothing here imports the library.

The library has a loader of its own for stage 3. It does not apply all rules of conversion, does not list the tensors
that the model does not take, and reports a wrong shape on rank 0 only. :func:`wrap_loading` replaces it by another
function, and :func:`redirect_tensors` makes the library's ordinary loader pass its tensors to that function.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_MODELS = "transformers.modeling_utils"
_LOADER = "transformers.core_model_loading"
_ZERO = "transformers.integrations.deepspeed"
_WRAPPED = "_ds_served"
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")

Put = Callable[[str, Any, Any], None]
"""Takes the name of a tensor of the model, its value, and the library's record of the loading."""


def wrap_loading(load: Callable[[nn.Module, Any, Callable[[], Any]], Any]) -> None:
    """Replaces the reading of files at stage 3, if imported, once, by ``load(model, settings, original)``."""
    kind: Any = getattr(sys.modules.get(_MODELS), "PreTrainedModel", None)
    original = getattr(kind, "_load_pretrained_model", None)
    loader = sys.modules.get(_LOADER)
    if original is None or hasattr(original, _WRAPPED) or not _passes_a_record(loader):
        return

    @functools.wraps(original)
    def load_files(model: nn.Module, state_dict: Any, files: Any, load_config: Any, *rest: Any, **more: Any) -> Any:
        call = functools.partial(original, model, state_dict, files, load_config, *rest, **more)
        if load_config.is_quantized or not sys.modules[_ZERO].is_deepspeed_zero3_enabled():
            return call()
        return load(model, load_config, call)

    setattr(load_files, _WRAPPED, True)
    kind._load_pretrained_model = staticmethod(load_files)


def _passes_a_record(loader: Any) -> bool:
    """Returns whether the library's loader takes a record. That of 5.0 does not, and gathers parameters itself."""
    setter = getattr(loader, "set_param_for_module", None)
    return setter is not None and "loading_info" in inspect.signature(setter).parameters


@contextmanager
def redirect_tensors(put: Put) -> Iterator[None]:
    """Makes the library's loader pass each tensor to ``put`` inside the context instead of setting it in the model."""
    loader: Any = sys.modules[_LOADER]
    before = loader.set_param_for_module

    def set_param_for_module(_: nn.Module, name: str, value: Any, info: Any, *args: Any, **kwargs: Any) -> None:
        put(name, value, info)

    loader.set_param_for_module = set_param_for_module
    try:
        yield
    finally:
        loader.set_param_for_module = before


def empty_record() -> Any:
    """Returns the library's record of a loading, with nothing in it."""
    return sys.modules[_MODELS].LoadStateDictInfo(
        missing_keys=set(), unexpected_keys=set(), mismatched_keys=set(), error_msgs=[], conversion_errors={},
        skipped_pp_keys=set(),
    )  # fmt: skip


def find_unlikely(model: Any, missing: Iterable[str], unexpected: Iterable[str], loaded: Iterable[str]) -> list[str]:
    """Returns the tensors that files lack by mistake, as they belong to repeated blocks.

    A new head, pooler or adapter may be missing on purpose. A tensor of a block is missing by mistake if the same
    tensor of another block was loaded, or if the files have tensors of blocks that the model does not take: then the
    names differ.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    new = _without(missing, [*(re.escape(name) for name in tied), *(model._keys_to_ignore_on_load_missing or ())])
    left_over = _without(unexpected, model._keys_to_ignore_on_load_unexpected or ())
    in_blocks = [name for name in new if _INDEX.search(name)]
    if any(_INDEX.search(name) for name in left_over):
        return sorted(in_blocks)
    present = {_INDEX.sub("*", name) for name in loaded}
    return sorted(name for name in in_blocks if _INDEX.sub("*", name) in present)


def _without(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    ignored = [re.compile(pattern) for pattern in patterns]
    return [name for name in names if not any(pattern.search(name) for pattern in ignored)]
