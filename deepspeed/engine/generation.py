"""Whether an engine shall generate, and whether its model can."""

from __future__ import annotations

from torch import nn

from deepspeed.config.sections.root import Root
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.pipe.module import PipelineModule


def generates(root: Root) -> bool:
    """Whether the configuration asks for an engine that generates."""
    return root.hybrid_engine is not None and root.hybrid_engine.enabled


def refuse_what_cannot_generate(root: Root, model: nn.Module) -> None:
    """Whether the model can do what ``hybrid_engine`` asks for.

    Raises:
        DeepSpeedConfigError: It cannot.
    """
    if not generates(root):
        return
    if isinstance(model, PipelineModule):
        raise DeepSpeedConfigError(
            "hybrid_engine.enabled: a pipeline does not generate; leave the section out, or the PipelineModule"
        )
    if not callable(getattr(model, "generate", None)):
        raise DeepSpeedConfigError(
            f"hybrid_engine.enabled: {type(model).__name__} has no method generate; give a model that generates, or "
            "leave the section out"
        )
