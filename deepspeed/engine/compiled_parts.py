"""The parts of a model that are compiled each by itself, and what the compiler made of them.

A part is a repeated block (a child of a ``ModuleList``), or a largest module without such blocks inside: an embedding,
a norm, a head. What calls the parts, such as the loop over the blocks, runs eagerly. Modules alike share one compiled
function, so their graphs are made once. Hooks of modules, gathers of ZeRO stage 3 and recomputation run around the
compiled forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import Parameter, signature
from types import FunctionType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from deepspeed.give_base import give_base
from deepspeed.logging import log_dist
from deepspeed.torch_private import (
    compiled_graphs,
    compiler_backend,
    graph_breaks,
    is_inside_backward,
    memory_budget,
)
from deepspeed.zero.address import gather_for_use

_LISTS = (nn.ModuleList, nn.ModuleDict)


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the names and modules of the parts, in order; ``model`` itself where it has no repeated blocks.

    What the program has compiled itself is left out, and modules whose class says ``compiles_itself``.
    """
    yield from _parts_below("", model, set(), is_block=False)


def _parts_below(name: str, module: nn.Module, seen: set[nn.Module], *, is_block: bool) -> Iterator[tuple[str, Any]]:
    is_compiled = module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
    if module in seen or is_compiled or getattr(type(module), "compiles_itself", False):
        return
    seen.add(module)
    is_pipeline = getattr(type(module), "is_pipeline", False)
    is_list = isinstance(module, _LISTS)
    has_blocks = any(isinstance(inner, _LISTS) and len(inner) for inner in module.modules())
    if not is_list and not is_pipeline and (is_block or not has_blocks):
        yield name, module
        return
    for child_name, child in module.named_children():
        child_path = f"{name}.{child_name}" if name else child_name
        yield from _parts_below(child_path, child, seen, is_block=is_list or is_pipeline)


class PartsCompiler:
    """Compiles the parts of one model, counts their graphs, and knows where these end.

    Args:
        backend: The backend of ``torch.compile``.
        arguments: Further arguments of ``torch.compile``.
        activation_memory_budget: Share of the activations that compiled parts keep, 0 to 1; None: torch's setting.
    """

    def __init__(self, backend: Any, arguments: dict[str, Any], activation_memory_budget: float | None) -> None:
        self._arguments = dict(arguments)
        mode, options = self._arguments.pop("mode", None), self._arguments.pop("options", None)
        self._compile_graph = compiler_backend(backend, mode, options, self._arguments.get("dynamic"))
        self._budget = activation_memory_budget
        self._parts: dict[Any, CompiledFunction] = {}
        self.running: CompiledFunction | None = None
        self.modules = 0  # number of modules that run compiled

    def compile_module(self, name: str, module: nn.Module) -> None:
        """Makes a module run compiled, in place; one like an earlier one shares its compiled function."""
        _give_base_for(module)
        states = [*module.named_parameters(), *module.named_buffers()]
        layout = tuple(
            (name, tuple(getattr(state, "ds_shape", state.shape)), state.dtype, state.requires_grad)
            for name, state in states
        )
        kinds = tuple((name, type(inner)) for name, inner in module.named_modules())
        key = (kinds, layout)
        if key not in self._parts:
            self._parts[key] = CompiledFunction(
                name or type(module).__name__, _forward_of(module, is_root=not name), self
            )
        module.__dict__["_compiled_function"] = self._parts[key]
        self.modules += 1

    def compile_function(self, name: str, function: Callable[..., Any]) -> CompiledFunction:
        """Returns the compiled form of a function."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        made = self._parts[name] = CompiledFunction(name, run, self)
        made.wrapped = function
        return made

    @property
    def count(self) -> int:
        """The number of compiled functions."""
        return len(self._parts)

    def compiled(self, run: FunctionType) -> Callable[..., Any]:
        """Returns ``run``, compiled by this object's backend."""
        return torch.compile(run, backend=self._on_graph, **self._arguments)

    def _on_graph(self, graph: Any, inputs: Any) -> Any:
        if self.running is not None:
            self.running.graphs += 1
        with memory_budget(self._budget):
            return self._compile_graph(graph, inputs)

    def report(self) -> dict[str, dict[str, Any]]:
        """Returns the number of graphs, their breaks and the recompilations by the name of each part that ran."""
        return {part.name: part.report() for part in self._parts.values() if part.ran}


class GraphCount:
    """Counts what the compiler makes of one function, or of modules that are alike."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.graphs = 0
        self._breaks: dict[str, None] = {}
        self._recompilations = 0
        self._modes: set[Any] = set()

    @property
    def ran(self) -> bool:
        """Whether it has been called."""
        return bool(self._modes)

    @contextmanager
    def counting(self, *, training: bool) -> Iterator[None]:
        """Counts the compilations inside the context, which is one call."""
        mode = (training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        is_first, graphs, breaks = mode not in self._modes, self.graphs, graph_breaks()
        try:
            yield
        finally:
            self._modes.add(mode)
            now = graph_breaks()
            if self.graphs != graphs or now != breaks:
                self._count([reason for reason in now if now[reason] != breaks.get(reason)], is_first)

    def _count(self, breaks: list[str], is_first: bool) -> None:
        was_whole = not self._breaks
        self._breaks.update(dict.fromkeys(reason.strip().splitlines()[0] for reason in breaks))
        self._recompilations += not is_first
        if was_whole and self._breaks:
            log_dist(f"compile: {self.name} runs in {self.graphs} graphs, which end at: {'; '.join(self._breaks)}")

    def report(self) -> dict[str, Any]:
        """Returns ``{"graphs": number, "breaks": [reasons], "recompilations": number}``."""
        return {"graphs": self.graphs, "breaks": [*self._breaks], "recompilations": self._recompilations}


class CompiledFunction(GraphCount):
    """The compiled forward of modules that are alike, or a compiled function."""

    def __init__(self, name: str, run: Any, compiler: PartsCompiler) -> None:
        super().__init__(name)
        self._compiler = compiler
        self.wrapped: Any = None  # the function as it was; None for the forward of modules
        # The compiler keeps its results by code object: a copy of its own, so that other parts do not share its limit.
        code = run.__code__.replace(co_name=f"run_{name.replace('.', '_')}")
        self._eager = FunctionType(code, run.__globals__, code.co_name, run.__defaults__, run.__closure__)
        self._eager.__kwdefaults__ = run.__kwdefaults__
        self._run = compiler.compiled(self._eager)

    def __deepcopy__(self, memo: Any) -> CompiledFunction:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the function returns. Steps of a generation with a cache, which grows, run eagerly."""
        if kwargs.get("past_key_values") is not None:
            return self._eager(*args, **kwargs)
        outer, self._compiler.running = self._compiler.running, self
        try:
            with self.counting(training=getattr(args[0], "training", True) if args else True):
                return self._run(*args, **kwargs)
        finally:
            self._compiler.running = outer


class _ProgramCompiledModule(nn.Module):
    """Mixin for a module that the program compiled by ``nn.Module.compile``: counts its graphs and recompilations."""

    _graph_count: GraphCount

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        count, before = self._graph_count, compiled_graphs()
        with count.counting(training=self.training):
            try:
                return super().__call__(*args, **kwargs)
            finally:
                count.graphs += compiled_graphs() - before


def count_graphs_of_program(model: nn.Module) -> list[GraphCount]:
    """Counts graphs of modules that the program compiled by ``nn.Module.compile`` from now on; returns the counts."""
    found = []
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None:
            count = give_base(module, _ProgramCompiledModule).__dict__["_graph_count"] = GraphCount(name)
            found.append(count)
    return found


class CompiledPart(nn.Module):
    """Mixin for a module whose forward runs compiled."""

    _compiled_function: CompiledFunction

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the program compiles what is around it
            return super().forward(*args, **kwargs)
        if is_inside_backward():  # recomputation may run without the hooks that gather
            gather_for_use(self.parameters())
        if not torch.is_grad_enabled():  # inputs of evaluation differ in nothing else from those of the first block
            args = tuple(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args)
        return self._compiled_function(self, *args, **kwargs)


def _forward_of(module: nn.Module, *, is_root: bool) -> Any:
    """Returns a function that calls the forward behind :class:`CompiledPart`.

    For a model that is one part it is that forward itself: where gathers of its children end a graph, the compiler goes
    on in the same function only, not in one that it calls.
    """
    part: Any = module
    own = getattr(super(CompiledPart, part).forward, "__func__", None)
    if is_root and isinstance(own, FunctionType):
        return own

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        return super(CompiledPart, module).forward(*args, **kwargs)

    return run


def _give_base_for(module: nn.Module) -> None:
    """Puts :class:`CompiledPart` in front of the class of a module; the signature of its forward stays."""
    if isinstance(module, CompiledPart):
        return
    found = [*signature(module.forward).parameters.values()]
    give_base(module, _base_with(tuple((one.name, one.kind, one.default is Parameter.empty) for one in found)))


@cache
def _base_with(parameters: tuple[tuple[str, Any, bool], ...]) -> type[CompiledPart]:
    """Returns the form of :class:`CompiledPart` whose forward has these parameters."""
    own = Parameter("self", Parameter.POSITIONAL_ONLY)
    named = [
        Parameter(name, kind) if is_needed else Parameter(name, kind, default=None)
        for name, kind, is_needed in parameters
    ]

    def forward(self: CompiledPart, *args: Any, **kwargs: Any) -> Any:
        return CompiledPart.forward(self, *args, **kwargs)

    forward.__signature__ = signature(forward).replace(parameters=[own, *named])  # type: ignore[attr-defined]
    return type("CompiledPart", (CompiledPart,), {"forward": forward})
