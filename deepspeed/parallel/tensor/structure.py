"""Derives rules from the computation of a model that brings none.

A linear layer whose output is added to the stream that its own input came from (with at most norms, scalings, views
and further summands between) *feeds a residual sum*: it is row-parallel. In the same repeated block, a linear layer
whose output goes to such layers only is column-parallel. The rest (routers, heads, projections between widths) stays
whole. The autograd graph of a small forward shows which tensors are added. Values do not matter, so it runs on
the meta device where the model allows that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from logging import WARNING
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.models.anatomy import input_embedding, output_head
from deepspeed.models.attention_modules import attention_of
from deepspeed.models.stacked_experts import experts_by_shapes
from deepspeed.parallel.tensor.layout import block_of
from deepspeed.parallel.tensor.rules import CutRule, CutStyle, is_linear
from deepspeed.uncompiled import without_compiling
from deepspeed.zero.address import full_shape

_MIXING = ("mm", "scaleddot", "attention", "linear", "convolution", "embedding", "einsum")
"""Parts, in small letters, of the names of graph nodes that bring features or positions together."""
_SOURCE = "the structure of the model"

Node = Any


class SmallForwardError(DeepSpeedConfigError):
    """The model does not run on the small inputs."""


def of_structure(model: nn.Module, inputs: Mapping[str, Any] | None, rows: Iterable[str] = ()) -> dict[str, CutRule]:
    """Returns the rules from the structure; empty where it shows no pair of layers, or ``inputs`` are unknown.

    With ``rows``, ends of names of layers that are declared row-parallel (``injection_policy_tuple``), all other linear
    layers of their blocks are column-parallel, and nothing is computed. Else a small forward runs with the ``inputs``;
    the model, whole or sharded, is left unchanged.

    Raises:
        SmallForwardError: The model does not run on ``inputs``.
    """
    linear = {name: module for name, module in model.named_modules() if is_linear(module) and _is_outermost(name)}
    endings = tuple(rows)
    inside: set[str] = set()
    if endings:
        found = {name for name in linear if any(name == end or name.endswith(f".{end}") for end in endings)}
        blocks = {block_of(name) for name in found}
        columns = {name for name in linear if name not in found and block_of(name) in blocks}
    elif inputs is None:
        return {}
    else:
        graph = _Graph(model, linear, inputs)
        found, columns = graph.pairs()
        inside = graph.inside(columns)
    rules = {}
    for name in linear:
        if name in found or name in columns:
            rules[name] = CutRule(CutStyle.ROW if name in found else CutStyle.COLUMN, _SOURCE)
    config = getattr(model, "config", None)
    for name, module in model.named_modules():
        above = attention_of(model.get_submodule(name.rpartition(".")[0]), config) if rules and "." in name else None
        if above is not None and isinstance(module, nn.Embedding) and module.embedding_dim == above.query:
            rules[name] = CutRule(CutStyle.PER_HEAD, _SOURCE)
        elif name in inside:
            rules[name] = CutRule(CutStyle.SUMMED, _SOURCE)
    return rules | _per_head(model, rules) | _vocabulary(model, rules) if rules else {}


def _per_head(model: nn.Module, rules: Mapping[str, CutRule]) -> dict[str, CutRule]:
    """Returns bare parameters of attention modules with a number per query head, where ranks share the heads."""
    cut = {name.rpartition(".")[0] for name, rule in rules.items() if rule.way is CutStyle.COLUMN}
    found = {}
    for name in sorted(cut):  # ranks must cut in the same order, and set order differs between processes
        module = model.get_submodule(name)
        attention = attention_of(module, getattr(model, "config", None))
        for own, parameter in module.named_parameters(recurse=False):
            if attention is not None and full_shape(parameter) == (attention.query,):
                found[f"{name}.{own}"] = CutRule(CutStyle.COLUMN, _SOURCE)
    return found


def summed_inside(
    model: nn.Module, inputs: Mapping[str, Any] | None, rules: Mapping[str, CutRule]
) -> dict[str, CutRule]:
    """Returns rules for uncut modules with parameters that work on the output of column-parallel layers.

    For example an activation function with parameters inside an MLP. ``rules`` are those known so far. The forward that
    finds the modules runs on the meta device only; where that is impossible, the result is empty.
    """
    linear = {name: module for name, module in model.named_modules() if is_linear(module) and _is_outermost(name)}
    columns = {name for name, rule in rules.items() if rule.way is CutStyle.COLUMN and name in linear}
    beside = {name.rpartition(".")[0] for name in columns} - {block_of(name) for name in columns}
    candidates = {
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[0] in beside
        and name not in rules
        and name not in linear
        and any(True for _ in module.parameters(recurse=False))
    }
    if inputs is None or not candidates:
        return {}
    try:
        found = _Graph(model, linear, inputs, is_meta=True).inside(columns)
    except SmallForwardError as error:
        log_dist(
            f"tensor_parallel: {type(model).__name__} does not run without values ({error}), so it is not known "
            f"whether {sorted(candidates)[0]!r} and {len(candidates) - 1} other modules beside cut layers get cut "
            "activations. Their gradients are not summed over the tensor ranks. Set tensor_parallel.verify to true to "
            "compare the cut model with the whole one",
            level=WARNING,
        )
        return {}
    return {name: CutRule(CutStyle.SUMMED, _SOURCE) for name in sorted(found & candidates)}


def _is_outermost(name: str) -> bool:
    """Returns whether a layer is not part of an adapter."""
    above, _, last = name.rpartition(".")
    if last == "base_layer":
        return False
    return not any(part in ("lora_A", "lora_B") for part in above.split("."))


def _vocabulary(model: nn.Module, rules: Mapping[str, CutRule]) -> dict[str, CutRule]:
    """Returns the embedding and the output layer of a language model."""
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for module, way in ((input_embedding(model), CutStyle.VOCABULARY), (output_head(model), CutStyle.COLUMN_GATHERED)):
        wanted = nn.Embedding if way is CutStyle.VOCABULARY else nn.Linear
        name = names.get(id(module))
        if type(module) is wanted and name is not None and name not in rules:
            found[name] = CutRule(way, _SOURCE)
    return found


class _Graph:
    """The autograd graph of a small forward."""

    def __init__(
        self, model: nn.Module, linear: Mapping[str, nn.Module], inputs: Mapping[str, Any], *, is_meta: bool = False
    ) -> None:
        self.widths: dict[str, int] = {}
        self.outputs: dict[str, Node] = {}
        self.inputs: dict[str, Node] = {}
        self._graph_tensors: list[torch.Tensor] = []
        self.others: dict[str, Node] = {}
        handles = [module.register_forward_hook(self._note(name)) for name, module in linear.items()]
        for name, module in model.named_modules():
            if name not in linear and not list(module.children()) and list(module.parameters(recurse=False)):
                handles.append(module.register_forward_hook(self._note_other(name)))
        try:
            roots = _forward(model, inputs, is_meta=is_meta)
        finally:
            for handle in handles:
                handle.remove()
        self.users: dict[Node, list[Node]] = {}
        self._walk([root.grad_fn for root in roots if root.grad_fn is not None])

    def _note(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.grad_fn is not None and args:
                self.widths[name] = output.shape[-1]
                self.outputs[name] = output.grad_fn
                self.inputs[name] = args[0].grad_fn
                self._graph_tensors += [output, args[0]]  # so that nodes keep their identity

        return hook

    def _note_other(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                self.others[name] = output.grad_fn
                self._graph_tensors.append(output)

        return hook

    def _walk(self, roots: list[Node]) -> None:
        seen, stack = set(roots), list(roots)
        while stack:
            node = stack.pop()
            for parent in _parents(node):
                self.users.setdefault(parent, []).append(node)
                if parent not in seen:
                    seen.add(parent)
                    stack.append(parent)

    def pairs(self) -> tuple[set[str], set[str]]:
        """Returns the names of the row-parallel and of the column-parallel layers."""
        by_output = {node: name for name, node in self.outputs.items()}
        sums: dict[str, Node] = {}
        for name, node in self.outputs.items():
            total = self._residual_sum(name, node)
            if total is not None and re.search(r"\.\d+\.", name):
                sums[name] = total
        rows = set(sums)
        blocks: dict[str, set[str]] = {}
        for name in rows:
            blocks.setdefault(block_of(name), set()).add(name)
        columns = set()
        for name in self.outputs:
            mates = blocks.get(block_of(name))
            if mates is None or name in rows:
                continue
            reached = self._reached(self.outputs[name], {self.outputs[mate] for mate in rows})
            met = {by_output[node] for node in reached if node in by_output and by_output[node] in rows}
            if met and met <= mates and not reached & set(sums.values()):
                columns.add(name)
        fed = {block_of(name) for name in columns}
        return {name for name in rows if block_of(name) in fed}, columns

    def inside(self, columns: set[str]) -> set[str]:
        """Returns the names of further modules with parameters whose input comes from column-parallel layers."""
        ends = {node for name, node in self.outputs.items() if name not in columns}
        cut: set[Node] = set()
        for name in columns & self.outputs.keys():  # layers of towers do not run without images
            cut |= self._reached(self.outputs[name], ends) - ends
        return {name for name, node in self.others.items() if node in cut}

    def _residual_sum(self, name: str, start: Node) -> Node | None:
        """Returns the sum of this layer's output with the stream that its input came from."""
        before = _ancestors(self.inputs[name])
        reached, stack = {start}, [start]
        while stack:
            node = stack.pop()
            for user in self.users.get(node, ()):
                others = [parent for parent in _parents(user) if parent not in reached and not _is_leaf(parent)]
                operation = type(user).__name__.lower()
                if operation.startswith("addbackward"):
                    if any(parent in before for parent in others):
                        return user
                elif others or any(part in operation for part in _MIXING):
                    continue
                if user not in reached:
                    reached.add(user)
                    stack.append(user)
        return None

    def _reached(self, start: Node, ends: set[Node]) -> set[Node]:
        """Returns all nodes that depend on ``start``, without those behind ``ends``."""
        reached, stack = {start}, [start]
        while stack:
            node = stack.pop()
            if node in ends and node is not start:
                continue
            for user in self.users.get(node, ()):
                if user not in reached:
                    reached.add(user)
                    stack.append(user)
        return reached


def _parents(node: Node) -> list[Node]:
    return [parent for parent, _ in node.next_functions if parent is not None]


def _is_leaf(node: Node) -> bool:
    """Returns whether a node is a parameter's, or of a view of one."""
    return type(node).__name__ == "AccumulateGrad" or not any(_parents(node))


def _ancestors(node: Node) -> set[Node]:
    if node is None:
        return set()
    found, stack = {node}, [node]
    while stack:
        for parent in _parents(stack.pop()):
            if parent not in found and type(parent).__name__ != "AccumulateGrad":
                found.add(parent)
                stack.append(parent)
    return found


def _forward(model: nn.Module, inputs: Mapping[str, Any], *, is_meta: bool) -> list[torch.Tensor]:
    """Returns the outputs of a small forward with stand-ins for all parameters, on the meta device if possible.

    With ``is_meta`` it runs there only. Raises ``SmallForwardError`` if the model's forward raises.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with without_compiling(), experts_by_shapes(model):
            try:
                return _run(model, inputs, torch.device("meta"))
            except (RuntimeError, NotImplementedError, ValueError, TypeError):  # the model's code branches on values
                if not is_meta and not next(model.parameters()).is_meta:
                    return _run(model, inputs, None)
                with _NoValues():
                    return _run(model, inputs, torch.device("meta"))
    except Exception as error:  # the model's own code may raise anything
        raise SmallForwardError(" ".join(f"{type(error).__name__}: {error}".split())) from error
    finally:
        for module, mode in modes.items():
            module.training = mode


class _NoValues(TorchDispatchMode):
    """Returns 0 where a model reads a value of a meta tensor, for example whether an input is padded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def _run(model: nn.Module, inputs: Mapping[str, Any], device: torch.device | None) -> list[torch.Tensor]:
    stand_ins: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        made = torch.zeros(full_shape(parameter), dtype=parameter.dtype, device=device or parameter.device)
        stand_ins[name] = made.requires_grad_(made.is_floating_point())
    if device is not None:
        stand_ins |= {name: buffer.to(device) for name, buffer in model.named_buffers()}
        inputs = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    with torch.enable_grad():
        result = torch.func.functional_call(model, stand_ins, (), dict(inputs), tie_weights=True)
    values = result.values() if isinstance(result, Mapping) else result if isinstance(result, tuple) else (result,)
    return [value for value in values if isinstance(value, torch.Tensor)]
