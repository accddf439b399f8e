"""Splits a backward: first the gradients of the inputs, for which another stage waits, later those of the weights.

The first half computes gradients from the outputs to the inputs only. At each node of the graph that also leads to a
weight it keeps the incoming gradients. The second half starts at these nodes with the kept gradients and computes the
weights' (Qi et al. 2024, "Zero Bubble Pipeline Parallelism"). So each half of a matrix product's backward is computed
once.

If a weight is reached from two of the nodes, the backward is not split: the first half is the whole backward. So it is
under recomputation, which would otherwise run once per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any  # torch.autograd.graph.Node


@dataclass
class _BranchNode:
    """A node between outputs and inputs that also leads to weights."""

    node: Node
    weights: list[torch.Tensor]
    arrived: tuple[torch.Tensor | None, ...] = ()


@dataclass
class WeightWork:
    """Holds what the second half of a backward, the weights' gradients, still has to do."""

    branches: list[_BranchNode] = field(default_factory=list)  # where the second half starts
    # outputs from which no input is reached, with their gradients
    roots: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    owners: list[Node | GradientEdge] = field(default_factory=list)  # what keeps the nodes of ``branches`` alive

    def run(self) -> None:
        """Accumulates the gradients of the weights."""
        for branch in self.branches:
            pairs = [(GradientEdge(branch.node, i), g) for i, g in enumerate(branch.arrived) if g is not None]
            if pairs:
                edges, gradients = zip(*pairs, strict=True)
                # Hooks on the node's outputs have changed these gradients already, and now they run again.
                handle = branch.node.register_prehook(lambda _gradients, arrived=branch.arrived: arrived)
                try:
                    torch.autograd.backward(edges, gradients, inputs=branch.weights)
                finally:
                    handle.remove()
        if self.roots:
            tensors, given = zip(*self.roots, strict=True)
            torch.autograd.backward(tensors, given)
        self.branches, self.roots, self.owners = [], [], []


def backward_to_inputs(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> WeightWork | None:
    """Runs the first half of a backward: accumulates the gradients of ``inputs``, which are leaves.

    ``roots`` are outputs that gradients come back for, of any shape. Returns the second half; None where there is none
    left, as this was the whole backward.
    """
    on_the_way, order, parents = _nodes_towards(roots, inputs)
    branches = []
    for node in order:
        aside = [child for child in _children(node) if child not in on_the_way]
        found = {id(weight): weight for child in aside for weight in _leaves(child, on_the_way)}
        if found:
            branches.append(_BranchNode(node, list(found.values())))
    beside = [pair for pair in zip(roots, gradients, strict=True) if get_gradient_edge(pair[0]).node not in on_the_way]
    weights = [id(weight) for branch in branches for weight in branch.weights]
    apart = [id(weight) for root, _ in beside for weight in _leaves(get_gradient_edge(root).node, on_the_way)]
    if len(set(weights)) < len(weights) or not set(weights).isdisjoint(apart):
        torch.autograd.backward(list(roots), list(gradients))
        return None
    through = [pair for pair in zip(roots, gradients, strict=True) if get_gradient_edge(pair[0]).node in on_the_way]
    handles = [branch.node.register_prehook(_keeper(branch)) for branch in branches]
    try:
        if through:
            tensors, given = zip(*through, strict=True)
            torch.autograd.backward(tensors, given, inputs=list(inputs), retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return WeightWork(branches, beside, _owners(branches, parents, [root for root, _ in through]))


def _keeper(branch: _BranchNode) -> Any:
    def keep(arrived: tuple[torch.Tensor | None, ...]) -> None:
        branch.arrived = arrived

    return keep


def _children(node: Node) -> Iterable[Node]:
    return (child for child, _ in node.next_functions if child is not None)


def _owners(
    branches: Sequence[_BranchNode], parents: Mapping[Node, Sequence[Node]], roots: Sequence[torch.Tensor]
) -> list[Node | GradientEdge]:
    """Returns what must be kept until the second half, so that no branch node ends with the outputs of the model.

    Before torch 2.13 the Python object of a node of an ``autograd.Function`` does not own the node. A node above it
    does, with all that this one saved for its own backward; so the nearest one is kept, and not the roots.
    """
    if torch.__version__ >= "2.13":
        return []
    owners: list[Node | GradientEdge] = []
    for branch in branches:
        node = branch.node
        while isinstance(node, BackwardCFunction) and node in parents:
            node = parents[node][0]
        if node is not branch.node and not isinstance(node, BackwardCFunction):
            owners.append(node)
    edges = [get_gradient_edge(root) for root in roots]
    return owners + [edge for edge in edges if isinstance(edge.node, BackwardCFunction)]


def _nodes_towards(
    roots: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[set[Node], list[Node], dict[Node, list[Node]]]:
    """Returns the nodes from which an input is reached, as a set and in order, and the nodes that lead to each node."""
    targets = {get_gradient_edge(tensor).node for tensor in inputs}
    parents: dict[Node, list[Node]] = {}
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [get_gradient_edge(root).node for root in roots]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        order.append(node)
        for child in _children(node):
            parents.setdefault(child, []).append(node)
            stack.append(child)
    found: set[Node] = set()
    stack = [node for node in targets if node in seen]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += parents.get(node, [])
    return found, [node for node in order if node in found], parents


def _leaves(start: Node, without: set[Node]) -> list[torch.Tensor]:
    """Returns the leaves that are reached from a node without passing the nodes of ``without``."""
    found, seen, stack = [], set(), [start]
    while stack:
        node = stack.pop()
        if node in seen or node in without:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        stack += _children(node)
    return found
