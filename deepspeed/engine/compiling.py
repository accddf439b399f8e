"""``torch.compile`` of an engine's model, part by part, and what stage 3 refuses.

At stage 3 parameters are gathered between the compiled graphs: at the hooks of each unit, and at every use of a
parameter that is sharded then. Torch's compiler breaks its graphs there, so a model cannot be one graph.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.config.sections.root import Compile
from deepspeed.engine.compiled_parts import CompiledFunction, PartsCompiler, count_graphs_of_program, parts_of
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.give_base import wrap_forward
from deepspeed.logging import log_dist
from deepspeed.models.anatomy import anatomy, unwrapped
from deepspeed.models.head import is_library_loss, loss_function_of, takes_loss_function, use_loss_function
from deepspeed.zero.placement import Placement


class EngineCompile:
    """Compiles the model of one engine, at once if the configuration says so.

    Args:
        section: The section ``compile`` of the configuration.
        gathers_between: Whether there are gathers between compiled graphs, see :func:`gathers_between_graphs`.
    """

    def __init__(self, module: nn.Module, section: Compile, gathers_between: bool) -> None:
        self._module = module
        self._budget = section.activation_memory_budget if section.enabled else None
        self._gathers_between = gathers_between
        self._parts: PartsCompiler | None = None
        self._of_program = count_graphs_of_program(module)
        if section.enabled and not section.disable:
            self.compile(section.backend, section.kwargs)

    @property
    def is_done(self) -> bool:
        """Whether :meth:`compile` was called."""
        return self._parts is not None

    def compile(
        self,
        backend: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the model in place by ``torch.compile``, as ``compile: {"enabled": true}`` does.

        Each repeated block is compiled once for all its copies, then the remaining parts (embedding, norm, head) and
        the loss of a Transformers model. What calls them, such as the loop over the blocks and a loss that the model's
        own forward computes, runs eagerly, and so does what the program has compiled by itself: that stays as it is.
        A Transformers model then returns ``past_key_values`` only where it is called with ``use_cache=True``.

        Args:
            backend: The backend of ``torch.compile``: a name, a function, or its dotted name. None: the accelerator's.
            compile_kwargs: Further arguments of ``torch.compile``.
            schedule: DeepCompile schedule; not supported.
            compiled_autograd_enabled: Compiled autograd; not supported.

        Raises:
            NotYetSupportedError: An argument of DeepCompile.
            DeepSpeedConfigError: ``fullgraph=True`` at stage 3 on several ranks, or an unknown backend.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise NotYetSupportedError(
                "engine.compile: schedule and compiled_autograd_enabled belong to DeepCompile, which this release does "
                "not have; leave them out"
            )
        arguments = dict(compile_kwargs or {})
        if arguments.get("fullgraph") and self._gathers_between:
            raise DeepSpeedConfigError(_whole_graph("engine.compile(compile_kwargs=...)", self._module))
        backend = arguments.pop("backend", None) if backend is None else backend
        parts = PartsCompiler(_backend_of(backend), arguments, self._budget)
        for name, module in parts_of(self._module):
            parts.compile_module(name, module)
        _compile_loss(self._module, parts)
        self._parts = parts
        log_dist(f"compile: {parts.count} compiled functions serve {parts.modules} modules of the model")

    def compile_report(self) -> dict[str, dict[str, Any]]:
        """Returns what the compiler made of each part that has run on this rank; empty if none is compiled.

        Modules that share their graphs are named once, by the first of them. Those that the program has compiled by
        ``nn.Module.compile`` before ``initialize`` count too; forwards that a backward repeats do not, there.

        Returns:
            ``{name: {"graphs": number, "breaks": [reasons], "recompilations": number}}``. Graphs count those of
            evaluation too. Breaks are the reasons why graphs end inside the part. A recompilation is a compilation in a
            mode (training or not, with gradients or not) in which the part had run before. ``"loss"`` is the loss
            function of a Transformers model.
        """
        of_program = {count.name: count.report() for count in self._of_program if count.graphs}
        return of_program | ({} if self._parts is None else self._parts.report())


def _backend_of(backend: Any) -> Any:
    """Returns a backend by its name, or by the dotted name of its function."""
    if backend is None:
        return get_accelerator().get_compile_backend()
    if not isinstance(backend, str) or backend in torch.compiler.list_backends(exclude_tags=()):
        return backend
    try:
        return resolve_name(backend)
    except (ImportError, AttributeError, ValueError) as error:
        raise DeepSpeedConfigError(
            f"compile.backend={backend!r}: expected a backend of torch.compile or the dotted name of a function, found "
            f"neither ({error}). Choose one of {', '.join(sorted(torch.compiler.list_backends(exclude_tags=())))}"
        ) from error


def _compile_loss(model: nn.Module, parts: PartsCompiler) -> None:
    """Compiles the loss function of a Transformers model, and makes its decoder run without a cache by default."""
    inner = unwrapped(model)
    if not takes_loss_function(inner, with_inputs=True):
        return
    loss = loss_function_of(inner)
    if isinstance(loss, CompiledFunction):
        loss = loss.wrapped
    elif (decoder := anatomy(inner).decoder) is not None:
        wrap_forward(decoder, _call_without_cache)
    if is_library_loss(loss):  # those of this package may communicate, or are compiled already
        use_loss_function(inner, parts.compile_function("loss", loss))


def _call_without_cache(module: nn.Module, former: Any, *args: Any, **kwargs: Any) -> Any:
    # A cache is kept by the number of the layer, which would give each block a graph of its own.
    if kwargs.get("use_cache") is None and kwargs.get("past_key_values") is None:
        kwargs["use_cache"] = False
    return former(*args, **kwargs)


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
