"""Compiled models: ``torch.compile`` before ``initialize`` and ``engine.compile``.

At stage 3 gathers lie between the compiled graphs, also where the root's own forward uses a parameter of somebody else.
"""

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from tests.engine.support import WIDTH, engine_of, inputs, rank
from tests.harness import on_ranks, run_ranks
from tests.harness.cases import EVERY_STAGE, STAGE_3, Case, check
from tests.harness.toy_models import Layer


class Net(nn.Module):
    """Units and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return (x @ self.embedding.weight.t()).square().mean()


class Direct(nn.Module):
    """A root that uses parameters of its own and of others: whole, in part, in functions, without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.tokens = nn.Embedding(13, WIDTH)
        self.positions = nn.Embedding(2, WIDTH)
        self.below = Layer()
        self.above = Layer()
        self.heads = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(2))

    def forward(self, x):
        x = x @ self.mix + self.tokens.weight[:WIDTH].mean(0) + self.positions.weight  # never called themselves
        x = self.above(self.below(x) @ self.below.rise.weight.t() @ self.below.rise.weight)
        y = F.linear(x, self.tokens.weight).square().mean() + self._size_of(self.heads[1])
        with torch.no_grad():
            largest = self.above.rise.weight.abs().max()
        return y * self.tokens.weight.shape[0] / 13 + largest

    def _size_of(self, weight):
        return weight.square().mean()


def _loss(model, step, of):
    return model(inputs(step, of))


def _before(backend, stages, make=Net):
    torch._dynamo.reset()
    check(Case("before", make, _loss, stages=stages, prepare=lambda model: torch.compile(model, backend=backend)))


def _units_before(backend, stages):
    """As training scripts compile: block by block."""

    def prepare(model):
        for layer in model.layers:
            layer.compile(backend=backend)
        return model

    torch._dynamo.reset()
    check(Case("units before", Net, _loss, stages=stages, prepare=prepare))


def _engine(backend, stages, make=Net):
    def ready(engine):
        assert not engine.is_compiled
        engine.compile(backend=backend)
        assert engine.is_compiled

    torch._dynamo.reset()
    check(Case("engine", make, _loss, stages=stages, ready=ready))


FORMS = {"before": _before, "units before": _units_before, "engine": _engine}


@pytest.mark.parametrize("form", FORMS)
def test_compiled(form):
    stages = [EVERY_STAGE[0], EVERY_STAGE[2], *STAGE_3]
    run_ranks(FORMS[form], 2, "aot_eager", stages)


def _graphs(form, limits):
    """Trains, and returns what the compiler got: the operations of each of its graphs."""
    from torch._dynamo.backends.debugging import aot_eager

    graphs = []

    def backend(graph, examples):
        graphs.append([getattr(node.target, "__name__", node.target) for node in graph.graph.nodes if node.args])
        return aot_eager(graph, examples)

    FORMS[form](backend, [limits], Direct)
    return graphs


@pytest.mark.parametrize(
    "form, limits",
    [
        ("before", STAGE_3[0]),
        ("engine", STAGE_3[1]),
        pytest.param("before", STAGE_3[1], marks=pytest.mark.slow),
        pytest.param("engine", STAGE_3[0], marks=pytest.mark.slow),
    ],
)
def test_a_root_that_uses_parameters_itself(form, limits):
    """The numbers are those of plain torch, and what is between two gathers is compiled."""
    graphs = run_ranks(_graphs, 2, form, limits)[0]
    operations = [operation for graph in graphs for operation in graph]
    assert {"matmul", "tanh", "mean"} <= set(operations), graphs
    # Torch 2.11 leaves a library layer alone where a hook of it may not be compiled.
    assert operations.count("linear") >= 2 or torch.__version__ < "2.12", graphs


def _refused():
    """``fullgraph=True`` cannot be: each way to ask for it is told so, before anything is changed."""
    found = []
    model = Direct()
    for call in (
        lambda: engine_of(nn.Sequential(torch.compile(model, fullgraph=True, backend="aot_eager")), 3),
        lambda: engine_of(model, 3).compile(backend="aot_eager", compile_kwargs={"fullgraph": True}),
    ):
        with pytest.raises(DeepSpeedConfigError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_one_graph_is_refused_at_stage_3():
    before, after = run_ranks(_refused, 2)[0]
    assert before.startswith("initialize(model=...), module '0': Direct is to be compiled with fullgraph=True")
    assert after.startswith("engine.compile(compile_kwargs=...): Direct") and "Leave fullgraph out" in after


class _Fragile(Direct):
    """Fails in the middle of its forward, when told to."""

    fails = False

    def forward(self, x):
        x = self.below(x)
        if self.fails:
            raise ValueError("on purpose")
        return super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before", "engine", "outside"])
@on_ranks(2)
def test_a_compiled_forward_that_fails(how):
    """A step that fails inside a compiled forward, and the steps around it: as without a compiler."""
    runs = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(3)
        model = _Fragile()
        given = torch.compile(model, backend="aot_eager") if compiled and how == "before" else model
        engine = engine_of(given, 3)
        if compiled and how == "engine":
            engine.compile(backend="aot_eager")
        call: Any = torch.compile(engine, backend="aot_eager") if compiled and how == "outside" else engine
        losses = []
        for step in range(4):
            model.fails = step == 1
            try:
                loss = call(inputs(step, rank()))
            except ValueError:
                continue
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        assert len(losses) == 3
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                losses.append(call(inputs(9, rank())).clone())
        runs.append(losses)
        engine.destroy()
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_a_compiled_engine_evaluates():
    """A compiled engine also evaluates, and trains on."""
    torch._dynamo.reset()
    engine = engine_of(Net(), 2)
    engine.compile(backend="aot_eager")
    for step in range(2):
        engine.backward(engine(inputs(step, rank())))
        engine.step()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                engine.eval()
                assert engine(inputs(step, rank())).isfinite()
                engine.train()
    assert engine.global_steps == 2


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="no compiler")
@pytest.mark.parametrize("form", FORMS)
def test_compiled_by_inductor(form):
    run_ranks(FORMS[form], 2, "inductor", [EVERY_STAGE[0], *STAGE_3], timeout=400)
    if form != "units before":
        run_ranks(FORMS[form], 2, "inductor", STAGE_3[:1], Direct, timeout=400)
