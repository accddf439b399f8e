"""``compile`` and ``engine.compile()``: one graph for all copies of a block, and the eager losses."""

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.pipe import PipelineModule
from tests.ecosystem.support import forget_runs, on_cpu_ranks
from tests.engine.support import WIDTH, engine_of, inputs, rank
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import Layer, causal_model

RECOMPUTED = {"activation_checkpointing": {"blocks": True}}


class _Net(nn.Module):
    """Blocks between two layers; the loss is computed by the root."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def _own(stage, *, compiled, shorter=False, by_program=False, **more):
    """Losses of five steps and an evaluation; reports after the second step and at the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = _Net()
    if by_program and compiled:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    engine = engine_of(model, stage, compile={"enabled": compiled, "backend": "aot_eager"}, **more)
    found, reports = [], []
    steps = 5 * engine.gradient_accumulation_steps()
    for step in range(steps):
        samples = 1 if shorter and step == steps - 1 else 2
        loss = engine(inputs(step, rank(), samples=samples))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
        reports.append(engine.compile_report())
    engine.eval()
    with torch.no_grad():
        found.append(engine(inputs(9, rank())).item())
    return found, reports[1], reports[-1], engine.compile_report()


def _causal(stage, *, compiled, shorter=False, **more):
    torch._dynamo.reset()
    sizes: dict[str, Any] = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    model = causal_model(**sizes, num_attention_heads=2, num_key_value_heads=2)
    engine = engine_of(model, stage, compile={"enabled": compiled, "backend": "aot_eager"}, **more)
    found, reports = [], []
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + rank())
        tokens = torch.randint(0, 23, (1 if shorter and step == 4 else 2, 12), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
        reports.append(engine.compile_report())
    engine.eval()
    with torch.no_grad():
        found.append(engine(input_ids=tokens, labels=tokens).loss.item())
    return found, reports[1], reports[-1], engine.compile_report()


def _both(kind, stage, more):
    return kind(stage, compiled=True, **more), kind(stage, compiled=False, **more)


CELLS: list[Any] = [
    (_own, 0, {"shorter": True}),
    (_own, 2, {**RECOMPUTED, "accumulation": 2, "gradient_clipping": 1.0}),
    (_own, 3, {**RECOMPUTED, "zero": {"offload_optimizer": {"device": "cpu"}}}),
    (_own, 3, {**RECOMPUTED, "by_program": True}),
    (_causal, 3, RECOMPUTED),
    pytest.param((_causal, 1, {"shorter": True}), marks=pytest.mark.slow),
    pytest.param((_causal, 3, {}), marks=pytest.mark.slow),
    pytest.param((_causal, 2, {"fused_loss": True}), marks=pytest.mark.slow),
    pytest.param((_own, 0, {"fp16": {"enabled": True}}), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("cell", CELLS)
def test_blocks_share_one_graph_and_losses_are_the_eager_ones(cell: Any) -> None:
    kind, stage, more = cell
    if kind is _causal:
        pytest.importorskip("transformers")
    (losses, second, last, evaluated), (expected, *none) = run_ranks(_both, 2, kind, stage, more, timeout=400)[0]
    tolerance = 2e-3 if "fp16" in more else 1e-6
    assert losses == pytest.approx(expected, rel=tolerance)
    assert none == [{}, {}, {}]
    blocks = "model.layers.0" if kind is _causal else "layers.0"
    assert blocks in second
    assert not any("layers.1" in name for name in second)
    assert ("loss" in second) == (kind is _causal and "fused_loss" not in more)
    further = int("shorter" in more)
    for name, part in second.items():
        assert part == {"graphs": 1, "breaks": [], "recompilations": 0}, name
        assert last[name] == {"graphs": 1 + further, "breaks": [], "recompilations": further}, name
        assert evaluated[name]["graphs"] == 2 + further, name
        assert evaluated[name]["recompilations"] == further, name


def _program_blocks() -> tuple[int, list[float], list[float]]:
    """Graphs of blocks that the program compiles and the engine recomputes, and losses with and without them."""
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    found = []
    for compiled in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = _Net()
        if compiled:
            for layer in model.layers:
                layer.compile(backend=backend)
        engine = engine_of(model, 0, **RECOMPUTED)
        losses = [engine(inputs(step)) for step in range(2)]
        for loss in losses:
            engine.backward(loss)
        found.append([loss.item() for loss in losses])
    return graphs, *found


@on_ranks(1)
def test_recomputation_around_blocks_of_the_program() -> None:
    graphs, compiled, eager = _program_blocks()
    assert graphs == 1 and compiled == eager


class _Cut(nn.Module):
    """A block of two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        torch._dynamo.graph_break()
        return y.tanh()


class _Breaking(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Cut() for _ in range(2))


@on_ranks(1)
def test_report_names_breaks_and_backends_may_be_dotted() -> None:
    torch._dynamo.reset()
    section = {"enabled": True, "backend": "torch._dynamo.backends.debugging.eager"}
    engine = engine_of(_Breaking(), 0, compile={**section, "activation_memory_budget": 0.5})
    engine.backward(engine(inputs(0)))
    engine.step()
    report = engine.compile_report()["layers.0"]
    assert report["graphs"] == 2 and len(report["breaks"]) == 1
    with pytest.raises(DeepSpeedConfigError, match=r"compile.backend='no.such': expected a backend"):
        engine.compile(backend="no.such")


def _in_pipeline() -> None:
    found = []
    for enabled in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), Layer(), Layer(), nn.Linear(WIDTH, 3)]
        model = PipelineModule(layers, num_stages=2, loss_fn=lambda y, _: y.square().mean())
        compiled = {"enabled": enabled, "backend": "aot_eager"}
        engine = engine_of(model, 1, accumulation=2, compile=compiled)
        batches = iter([(inputs(number), torch.zeros(2)) for number in range(6)])
        found.append([float(engine.train_batch(batches)) for _ in range(3)])
        report = engine.compile_report()
        assert bool(report) == enabled
        assert all(part == {"graphs": 1, "breaks": [], "recompilations": 0} for part in report.values()), report
        engine.destroy()
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@on_cpu_ranks
def _by_accelerate() -> None:
    """Accelerate's switch, which ``torch_compile`` of Transformers' Trainer sets too."""
    from accelerate import Accelerator, DeepSpeedPlugin

    found = []
    for backend in ("aot_eager", "no"):
        torch._dynamo.reset()
        forget_runs()
        torch.manual_seed(0)
        model = _Net()
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        accelerator = Accelerator(dynamo_backend=backend, deepspeed_plugin=plugin)
        engine, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for step in range(3):
            loss = engine(inputs(step, rank()))
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
        found.append(losses)
        report = engine.compile_report()
        assert {*report} == ({"embedding", "layers.0", "head"} if backend != "no" else set())
        assert all(part["graphs"] == 1 and not part["breaks"] for part in report.values()), report
        engine.destroy()
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("body", [_in_pipeline, _by_accelerate])
def test_other_doors_to_the_compiler(body: Any) -> None:
    if body is _by_accelerate:
        pytest.importorskip("accelerate")
    run_ranks(body, 2)
