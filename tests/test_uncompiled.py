"""Functions that the compiler leaves alone are left alone as ``torch.compiler.disable`` leaves them."""

from __future__ import annotations

import copy
import sys
from functools import partial

import pytest
import torch

from deepspeed.uncompiled import torchs, uncompiled


def _graphs(leave_alone):
    """The operations of each graph of a function with one call in its middle that is to be left alone."""
    graphs = []

    def backend(graph, examples):
        graphs.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def below(x):
        return torch.sin(x)

    def middle(x):
        return torch.add(torch.sub(below(x), 1), 1)

    middle = leave_alone(middle)

    def outer(x):
        return torch.mul(middle(torch.neg(x)), 2)

    torch._dynamo.reset()
    x = torch.randn(3)
    expected = (-x).sin() * 2
    torch.testing.assert_close(torch.compile(outer, backend=backend)(x), expected)
    torch.testing.assert_close(torch.compile(outer, backend=backend)(x), expected)
    return graphs


@pytest.mark.parametrize("recursive", (True, False))
def test_graphs_are_those_of_torchs_decorator(recursive):
    ours = _graphs(partial(uncompiled, recursive=recursive))
    assert ours == _graphs(partial(torch.compiler.disable, recursive=recursive))
    operations = [operation for graph in ours for operation in graph]
    assert "sub" not in operations and ["neg"] in ours and ["mul"] in ours
    assert ("sin" in str(operations)) is not recursive


def test_the_reason_is_named():
    @partial(uncompiled, reason="it talks to other ranks")
    def middle(x):
        return x + 1

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="it talks to other ranks"):
        torch.compile(lambda x: middle(x) * 2, backend="eager", fullgraph=True)(torch.ones(2))


def test_torchs_method_does_the_same_without_its_wrapper(monkeypatch):
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    made = torch.optim.SGD(parameters[:1], lr=0.5)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert torchs(made.add_param_group) is not made.add_param_group
    torchs(made.add_param_group)({"params": parameters[1:]})
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.5]
    assert made.param_groups[1]["params"][0] is parameters[1]
    saved = torchs(made.state_dict)()
    torchs(copy.deepcopy(made).load_state_dict)(saved)
    assert saved["param_groups"][1]["params"] == [1]
    assert "torch._dynamo" not in sys.modules
