"""Pipelines with what models and machines bring along: disks, compiled layers, recomputation, adapters, memory."""

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.parallel.pipe.schedule import TRAIN_SCHEDULES, make_schedule
from deepspeed.parallel.pipe.schedule.lists import held
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from tests.harness import on_ranks
from tests.harness.pool import run_ranks
from tests.harness.toy_models import causal_model
from tests.parallel.pipe import support


def _cells(folder: str) -> dict[str, dict[str, Any]]:
    disk = {"device": "nvme", "nvme_path": folder}
    return {
        "states on disk": {"stage": 1, "more": {"zero": {"offload_optimizer": disk}}, "schedule": "interleaved"},
        "all on disk": {
            "stage": 3,
            "more": {"zero": {"offload_optimizer": disk, "offload_param": {**disk, "max_in_cpu": 0}}},
        },
        "recomputed": {"stage": 2, "more": {"pipeline": {"activation_checkpoint_interval": 1}}},
        "recomputed, reentrant": {
            "stage": 2,
            "more": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}},
        },
        "recomputed, reentrant, split": {
            "stage": 3,
            "schedule": "zbv",
            "more": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}},
        },
        "compiled, stage 3": {"stage": 3, "backend": "eager", "schedule": "zb-h1"},
    }


MORE_COMPILED: dict[str, dict[str, Any]] = {
    "compiled": {"stage": 1, "backend": "eager"},
    "compiled backward too": {"stage": 2, "backend": "aot_eager"},
}


def _train(stages: int, cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    means = {}
    for name, cell in cells.items():
        given = dict(cell)
        backend = given.pop("backend", None)
        engine = support.engine_of(stages, given.pop("stage"), 3, **given)
        if backend is not None:
            torch._dynamo.reset()
            engine.module.compile(backend=backend)
        means[name] = support.train(engine, 3, 3)
        engine.destroy()
    return means


@pytest.mark.parametrize("more", [None, pytest.param(MORE_COMPILED, marks=pytest.mark.slow)])
def test_like_one_process(tmp_path, more):
    cells = more or _cells(str(tmp_path))
    expected, _ = run_ranks(support.reference, 1, 1, 3)[0]
    first, second = run_ranks(_train, 2, 2, cells, timeout=200)
    for name in cells:
        assert first[name] == second[name], name
        torch.testing.assert_close(
            torch.tensor(first[name]),
            torch.tensor(expected),
            rtol=3e-6,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )


class _Counted:
    """Lives as long as the graph of one forward does."""

    alive = 0

    def __init__(self) -> None:
        _Counted.alive += 1

    def __del__(self) -> None:
        _Counted.alive -= 1


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.kept = _Counted()
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class _Keeper(nn.Module):
    most: ClassVar[int] = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = _Keeps.apply(x, self.weight)
        _Keeper.most = max(_Keeper.most, _Counted.alive)
        return made


def _square(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).pow(2).mean()


def _held(stages: int, count: int, width: int) -> dict[str, tuple[int, int, int]]:
    """By schedule, for how many micro-batches of a chunk something was kept at once, and what is left in the end.

    And how many of this stage's messages were kept before the last stage computed its last loss, or this one its last
    forward.
    """
    found = {}
    for name in TRAIN_SCHEDULES:
        chunks = len(make_schedule(name, stages, count).stage_of)
        module = PipelineModule(
            [_Keeper(width) for _ in range(chunks)], num_stages=stages, loss_fn=_square, partition_method="uniform",
            schedule=name,
        )  # fmt: skip
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": count,
            "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        }
        engine, *_ = deepspeed.initialize(model=module, config=config)
        _Keeper.most, kept = 0, 0

        def note(*_arguments: Any, transports: Any = engine._interpreter.channels) -> None:
            nonlocal kept
            kept = transports.kept

        module.forward_funcs[0].register_forward_hook(note)
        for _ in range(2):
            engine.train_batch(iter([(torch.randn(2, width), torch.randn(2, width))] * count))
        found[name] = (_Keeper.most, _Counted.alive, kept)
        engine.destroy()
    return found


@pytest.mark.parametrize("width", [4, 9000])
def test_what_is_held(width):
    stages, count = 4, 8
    for stage, found in enumerate(run_ranks(_held, stages, stages, count, width)):
        for name, (most, left, _) in found.items():
            planned = max(held(make_schedule(name, stages, count).actions[stage]))
            assert (name, stage, most, left) == (name, stage, planned, 0)
        assert found["1f1b"][0] == stages - stage + (stage < stages - 1) and found["gpipe"][0] == count
        # Activations that were sent are let go when the next stage confirms that it has them, and gradients likewise;
        # those that lie in a packet, among ranks of one host, as soon as they are sent.
        large = width > 4
        assert found["1f1b"][2] <= 3 * large, (stage, found)
        assert stage or found["gpipe"][2] == (count - 1) * large
        assert found["zb-h1"][0] <= stages and found["zbv"][0] <= 2 * stages


def _adapted(stages: int) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A language model with low-rank adapters: only these are trained."""
    from peft import LoraConfig, inject_adapter_in_model

    model = causal_model(
        vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    inject_adapter_in_model(LoraConfig(r=3, target_modules=["q_proj", "down_proj"], lora_dropout=0.0), model)
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    assert 0 < trained < sum(1 for _ in model.parameters()) / 2
    module = PipelineModule.from_transformers(model, num_stages=stages)
    engine, *_ = deepspeed.initialize(
        model=module,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
            "zero_optimization": {"stage": 2},
        },
    )
    before = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
    made = torch.Generator().manual_seed(1)
    items = [torch.randint(37, (2, 6), generator=made) for _ in range(3)]
    losses = [engine.train_batch(iter([((tokens,), tokens) for tokens in items])).item() for _ in range(3)]
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters() if name in before)
    return losses, {name: value.clone() for name, value in engine.iter_full("fp32") if "lora" in name}, before


def test_adapters():
    pytest.importorskip("peft")
    (losses, weights, _), *_ = run_ranks(_adapted, 1, 1)
    results = run_ranks(_adapted, 2, 2)
    found: dict[str, torch.Tensor] = {}
    for means, part, _ in results:
        torch.testing.assert_close(torch.tensor(means), torch.tensor(losses), rtol=2e-6, atol=1e-6)
        found |= part
    assert losses[-1] < losses[0] and found.keys() == weights.keys() and len(found) == 12
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=5e-6)


@on_ranks(1)
def test_the_weights_of_a_compiled_tied_head_belong_to_its_chunk() -> None:
    layers = [TiedLayerSpec("embed", support.Embed), TiedLayerSpec("embed", support.Embed, forward_fn=support.head)]
    module = PipelineModule(layers, num_stages=1)
    before = set(module.parameters_of(0))
    tokens = torch.arange(6).view(2, 3)
    expected = module(tokens)
    module.compile(backend="eager")
    module.forward_funcs[0] = lambda value: value  # leaves the tied head alone
    found = set(module.parameters_of(0))
    module.forward_funcs[0] = module.tied_modules["embed"]
    assert [bool(before), found == before, torch.equal(module(tokens), expected)] == [True, True, True]
