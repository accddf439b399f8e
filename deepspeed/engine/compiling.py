"""``torch.compile`` of an engine's model: what is passed on, and what stage 3 refuses.

At stage 3 parameters are gathered between the compiled graphs: at the hooks of each unit, and at every use of a
parameter that is sharded then. Torch's compiler breaks its graphs there, so a model cannot be one graph.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.zero.placement import Placement


class EngineCompile:
    """Compiles the model of one engine."""

    def __init__(self, module: nn.Module, gathers_between: bool) -> None:
        self._module = module
        self._gathers_between = gathers_between
        self.is_done = False

    def compile(
        self,
        backend: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the model in place by ``torch.compile``.

        Args:
            backend: The backend of ``torch.compile``; None is torch's default.
            schedule: DeepCompile schedule; not supported.
            compiled_autograd_enabled: Compiled autograd; not supported.

        Raises:
            NotYetSupportedError: An argument of DeepCompile.
            DeepSpeedConfigError: ``fullgraph=True`` at stage 3 on several ranks.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise NotYetSupportedError(
                "engine.compile: schedule and compiled_autograd_enabled belong to DeepCompile, which this release does "
                "not have; leave them out"
            )
        arguments = dict(compile_kwargs or {})
        if arguments.get("fullgraph") and self._gathers_between:
            raise DeepSpeedConfigError(_whole_graph("engine.compile(compile_kwargs=...)", self._module))
        if backend is not None:
            arguments["backend"] = backend
        self._module.compile(**arguments)
        self.is_done = True


def gathers_between_graphs(placement: Placement, ranks: int) -> bool:
    """Returns whether compiled graphs of a model have gathers between them."""
    return placement.shard_params and ranks > 1


def refuse_whole_graphs(model: nn.Module) -> None:
    """Raises if ``model`` was compiled into one graph before ``initialize``.

    Raises:
        DeepSpeedConfigError: Names the module.
    """
    for name, module in model.named_modules():
        inner = module.__dict__["_modules"].get("_orig_mod")
        if inner is not None and getattr(module.__dict__.get("dynamo_ctx"), "fullgraph", False):
            raise DeepSpeedConfigError(_whole_graph(f"initialize(model=...), module {name!r}", inner))


def _whole_graph(where: str, module: nn.Module) -> str:
    return (
        f"{where}: {type(module).__name__} is to be compiled with fullgraph=True, but at ZeRO stage 3 on several ranks "
        "its parameters are gathered between the compiled graphs, so there is more than one graph. Leave fullgraph "
        "out, or use a lower stage"
    )
