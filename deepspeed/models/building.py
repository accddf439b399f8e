"""Builds Transformers models and their configurations: from a name, from fields, and without values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def has_library() -> bool:
    """Returns whether the Transformers library is installed, and imports it."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def library_version() -> str:
    """Returns the version of the installed Transformers library."""
    import transformers

    return str(transformers.__version__)


def read_configuration(name: str | Path) -> Any:
    """Returns the configuration of a model by its name on the hub or its folder."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name)


def described_configuration(model_type: str, **fields: Any) -> Any:
    """Returns a family's configuration with these fields. Raises ValueError: the library lacks the family."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **fields)


def is_configuration(given: Any) -> bool:
    """Returns whether an object is a configuration of the library."""
    return hasattr(given, "to_diff_dict")


def class_named(architecture: str) -> Any:
    """Returns the model class of that name; None if the installed library does not have it."""
    import transformers

    return getattr(transformers, architecture, None)


def build(config: Any, model_class: Any = None, **more: Any) -> Any:
    """Returns a model that owns ``config``, by default the family's causal language model."""
    if model_class is None:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(config, **more)
    make = model_class._from_config if hasattr(model_class, "_from_config") else model_class.from_config
    return make(config, **more)


def build_without_values(config: Any, model_class: Any = None, **more: Any) -> Any:
    """Returns what :func:`build` does, with parameters and buffers on torch's ``meta`` device."""
    with torch.device("meta"):
        return build(config, model_class, **more)
