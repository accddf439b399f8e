"""``activation_checkpointing.blocks``: less is kept, and the training is the same."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.pipe import PipelineModule
from deepspeed.sequence import mean_loss
from tests.harness import on_ranks
from tests.harness.logged import logged
from tests.harness.pool import run_ranks
from tests.harness.toy_models import TOWER_WIDTH, Tower, causal_model
from tests.parallel.tensor.support import VOCABULARY, adamw, ids, llama


def train(stage: int, blocks: bool) -> tuple[list[float], int]:
    """Returns the losses, and how often the first block ran."""
    torch.manual_seed(0)
    model = Tower()
    calls = 0
    inner = model.layers[0].rise

    def count(*_):
        nonlocal calls
        calls += 1

    inner.register_forward_pre_hook(count)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.5,
        "activation_checkpointing": {"blocks": blocks},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    torch.manual_seed(engine.global_rank)
    losses = []
    for _ in range(6):
        loss = engine(torch.randn(2, TOWER_WIDTH))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, calls


@pytest.mark.parametrize("stage", [0, 3])
def test_blocks_run_twice_and_the_losses_are_the_same(stage):
    for (plain, once), (checkpointed, twice) in zip(
        run_ranks(train, 2, stage, False), run_ranks(train, 2, stage, True), strict=True
    ):
        assert checkpointed == plain
        assert (once, twice) == (6, 12)


class _Products(TorchDispatchMode):
    """Counts products that run."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return func(*args, **(kwargs or {}))


def _selective(make, stage):
    """Losses without recomputation, with it, and selective; the products of a step in each."""
    found = []
    for section in ({}, {"blocks": True}, {"blocks": "selective"}, {"blocks": "selective", "keep": ["aten.mul"]}):
        model, forward = make()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "activation_checkpointing": section,
        }
        engine = deepspeed.initialize(model=model, config=config)[0]
        losses = []
        for _ in range(3):
            with _Products() as products:
                loss = forward(engine)
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append((losses, products.count))
        engine.destroy()
    return found


def _tower():
    torch.manual_seed(0)
    return Tower(), lambda engine: engine(torch.ones(2, TOWER_WIDTH))


def _llama():
    return llama().train(), lambda engine: engine(input_ids=ids(0, 0), labels=ids(0, 0)).loss


@pytest.mark.parametrize("make", [_tower, _llama])
@pytest.mark.parametrize("stage", [0, 3])
def test_selective_blocks_compute_no_product_twice(make, stage):
    for plain, whole, selective, other in run_ranks(_selective, 2, make, stage):
        assert plain[0] == whole[0] == selective[0] == other[0]
        assert plain[1] == selective[1] < other[1] <= whole[1]


def _chosen(make, stage):
    """Losses, the products of a step, and the choice, with less and less memory."""
    found = []
    device = get_accelerator()
    for room, section in ((0, True), (1e9, "auto"), (45e3, "auto"), (0, "auto")):
        model, forward = make()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "activation_checkpointing": {"blocks": section},
        }
        with pytest.MonkeyPatch.context() as patch, logged() as lines:
            patch.setattr(device, "max_memory_allocated", lambda: 900)
            patch.setattr(device, "total_memory", lambda room=room: (900 + room) / 0.9)
            engine = deepspeed.initialize(model=model, config=config)[0]
            losses = []
            for _ in range(3):
                with _Products() as products:
                    loss = forward(engine)
                    engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        found.append((losses, products.count, lines.about("activation_checkpointing.blocks")))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_the_memory_chooses(stage):
    for rank, (whole, *chosen) in enumerate(run_ranks(_chosen, 2, _llama, stage)):
        assert all(losses == whole[0] for losses, _, _ in chosen)
        assert [count < whole[1] for _, count, _ in chosen] == [True, True, False]
        for name, (_, _, lines) in zip(("none", "selective", "full"), chosen, strict=True):
            assert len(lines) == (rank == 0) and all(f"{name} of auto" in line for line in lines)


@on_ranks(1)
def test_an_unknown_operation_is_refused() -> None:
    section = {"blocks": "selective", "keep": ["aten.matrix_product"]}
    with pytest.raises(DeepSpeedConfigError, match=r"keep: expected .*found 'aten.matrix_product'"):
        deepspeed.initialize(
            model=Tower(), config={"train_micro_batch_size_per_gpu": 2, "activation_checkpointing": section}
        )


@on_ranks(1)
def test_a_model_without_blocks_is_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {"blocks": True}}
    with pytest.raises(DeepSpeedConfigError) as caught:
        deepspeed.initialize(model=torch.nn.Linear(2, 2), model_parameters=[], config=config)
    found = str(caught.value)
    assert "expected a model with repeated blocks (children of a ModuleList), found none in Linear" in found


transformers = pytest.importorskip("transformers")


@on_ranks(1)
def test_a_model_keeps_its_mode() -> None:
    model = causal_model("GPT2", vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1).eval()
    config = {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {"blocks": True}}
    deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    assert not model.training and not model.transformer.h[0].training


LENGTH = 12
KEYS = {"activation_checkpointing": {"recompute_modules": ["core_attn"]}}


def _gpt2(attention: str, **changes: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 6}
    return causal_model("GPT2", **sizes, attn_implementation=attention, **changes)


MODELS = {
    "llama, eager": lambda: llama(attn_implementation="eager"),
    "llama, sdpa": lambda: llama(attn_implementation="sdpa"),
    "gpt2 with dropout, eager": lambda: _gpt2("eager"),
}


def _config(**more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, **more}


def _trained(model: nn.Module, more: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, weights, and how many tensors of heads by tokens by tokens forwards keep."""
    engine = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=_config(**more))[0]
    torch.manual_seed(3)
    squares = 0

    def pack(value: torch.Tensor) -> torch.Tensor:
        nonlocal squares
        squares += tuple(value.shape) == (2, 6, LENGTH, LENGTH)
        return value

    losses = []
    for step in range(3):
        batch = ids(step, 0, LENGTH)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine.destroy()
    return losses, weights, squares


@on_ranks(1)
def test_the_same_bits_without_scores() -> None:
    for name, make in MODELS.items():
        losses, weights, kept = _trained(make(), {})
        found_losses, found_weights, found_kept = _trained(make(), KEYS)
        assert found_losses == losses, name
        assert all(torch.equal(found_weights[key], value) for key, value in weights.items()), name
        assert found_kept == 0 and (kept > 0) == ("eager" in name), (name, kept, found_kept)


def _in_stages(pipe: int, more: dict[str, Any]) -> list[float]:
    module = PipelineModule.from_transformers(MODELS["llama, eager"](), num_stages=pipe)
    config = _config(gradient_accumulation_steps=2, **more)
    engine = deepspeed.initialize(model=module, optimizer=adamw(module.parameters()), config=config)[0]
    names = {layer.config._attn_implementation for layer in module.modules() if hasattr(layer, "config")}
    assert names == ({"eager_recomputed"} if more else {"eager"})
    batches = [(ids(step, 0, LENGTH),) * 2 for step in range(2)]
    return [engine.train_batch(iter(batches)).item() for _ in range(3)]


def test_in_a_pipeline():
    expected = run_ranks(_in_stages, 2, 2, {})
    assert run_ranks(_in_stages, 2, 2, KEYS) == expected


@on_ranks(1)
def test_what_has_no_attention_by_name_is_refused() -> None:
    for model, message in (
        (nn.Linear(3, 3), "expected a Transformers model, whose attention can be replaced, or .* found Linear"),
        (_gpt2("eager", reorder_and_upcast_attn=True), "reorder_and_upcast_attn computes attention in the layer"),
        (
            causal_model("CodeGen", vocab_size=67, n_embd=24, n_layer=1, n_head=4, rotary_dim=4),
            "does not take its attention from transformers' AttentionInterface",
        ),
    ):
        with pytest.raises(DeepSpeedConfigError, match=message):
            deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=_config(**KEYS))


def _shared(more: dict[str, Any]) -> tuple[list[float], int]:
    """Losses, and the elements that a forward keeps."""
    model = llama(attn_implementation="sdpa")
    config = _config(sequence_parallel_size=2, **more)
    engine = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0]
    rank, kept, losses = dist.get_rank(), 0, []

    def pack(value: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += value.numel()
        return value

    for step in range(3):
        batch = ids(step, 0, LENGTH)
        following = torch.nn.functional.pad(batch, (0, 1), value=-100)[:, 1:].chunk(2, 1)[rank]
        positions = torch.arange(LENGTH).expand_as(batch).chunk(2, 1)[rank]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            logits = engine(input_ids=batch.chunk(2, 1)[rank], position_ids=positions).logits
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss = mean_loss(each, following, engine.get_sequence_parallel_group())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, kept


def _refused_round_the_ranks() -> None:
    model = llama(attn_implementation="sdpa")
    config = _config(sequence_parallel_size=2, sequence_parallel={"mode": "ring"}, **KEYS)
    with pytest.raises(DeepSpeedConfigError, match="recompute_modules: ring attention .* keeps no scores"):
        deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)


def test_where_ranks_share_sequences():
    (losses, kept), *_ = run_ranks(_shared, 2, {})
    for more in ({}, {"sequence_parallel": {"recompute_exchange": True}}):
        for found, found_kept in run_ranks(_shared, 2, {**KEYS, **more}):
            assert found == losses
            assert found_kept < kept
    run_ranks(_refused_round_the_ranks, 2)
