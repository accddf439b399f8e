"""Progressive layer drop."""

import copy
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.comm.base.counters import counted
from deepspeed.dropping import ProgressiveLayerDrop
from deepspeed.dropping.layers import LayerDrop, droppable_blocks
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.gather.schedule import LearnedOrder
from tests.engine.support import SHARDED, adamw, engine_of, inputs, rank
from tests.harness import run_ranks
from tests.harness.toy_models import NO_DROPOUT, Layer, Tower, causal_model, masked_model, tower
from tests.zero.reading import full_params

# Progressive layer dropping: theta, the draws, and training with dropped layers at every stage.


FAST = {"enabled": True, "theta": 0.2, "gamma": 2.0}


def test_theta_by_the_formula():
    drop = ProgressiveLayerDrop(theta=0.5, gamma=0.01)
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    for step in range(20):
        drop.update_state(step)
        assert drop.get_theta() == (1.0 - 0.5) * numpy.exp(-0.01 * step) + 0.5


def test_draws_depend_on_their_moment_alone():
    drop = LayerDrop(8)
    drawn = [drop.draw(0.4, step) for step in range(4000)]
    assert [LayerDrop(8).draw(0.4, step) for step in (7, 3)] == [drawn[7], drawn[3]]
    assert LayerDrop(8, seed=1).draw(0.4, 7) == LayerDrop(8, seed=1).draw(0.4, 7)
    stayed = [sum(number not in dropped for dropped in drawn) / len(drawn) for number in range(8)]
    assert stayed == pytest.approx([1 - i / 8 * 0.6 for i in range(8)], abs=0.03) and stayed[0] == 1
    assert drop.draw(1.0, 5) == frozenset()


def test_a_block_is_right_in_the_mean_and_evaluation_is_whole():
    model = tower()
    plain = copy.deepcopy(model)
    drop = deepspeed.progressive_layer_drop(model, "layers")
    assert all(type(block).__name__ == "Layer" and isinstance(block, Layer) for block in model.layers)
    assert list(model.state_dict()) == list(plain.state_dict())
    x, block = inputs(1), model.layers[3]
    drop.draw(0.2, 0)
    share = drop.kept_share[3]
    drop.dropped = frozenset({3})
    assert block(x) is x
    drop.dropped = frozenset()
    torch.testing.assert_close(share * block(x) + (1 - share) * x, plain.layers[3](x))
    model.eval()
    drop.dropped = frozenset({1, 3})
    assert torch.equal(model(x), plain(x))
    copied = copy.deepcopy(model)
    assert len(droppable_blocks(copied)) == 1 and droppable_blocks(copied)[0][0] is not drop


def test_what_cannot_be_dropped_is_named():
    model = tower()
    with pytest.raises(ValueError, match="no module of that name. Choose from: 'layers'"):
        deepspeed.progressive_layer_drop(model, "blocks")
    with pytest.raises(ValueError, match="modules of the model, each once; found 1"):
        deepspeed.progressive_layer_drop(model, [Layer()])
    deepspeed.progressive_layer_drop(model, model.layers)
    with pytest.raises(ValueError, match="block 0 was passed in an earlier call"):
        deepspeed.progressive_layer_drop(model, [model.layers[2]])

    class Pair(Layer):
        def forward(self, x: torch.Tensor):  # type: ignore[override]
            return x, x

    two = nn.Sequential(Pair())
    deepspeed.progressive_layer_drop(two, list(two))
    with pytest.raises(ValueError, match="found a tuple of Tensor, Tensor"):
        two[0](inputs(1))


def test_orders_are_put_together():
    learned = LearnedOrder()
    assert learned.without(frozenset()) is None
    learned.learn([0, 1, 3, 9], frozenset({2}), falls=False)
    assert learned.without({2, 3}) == [0, 1, 9] and learned.without(frozenset()) is None
    learned.learn([0, 2, 9], frozenset({1, 3}), falls=False)
    assert learned.without(frozenset()) == [0, 1, 2, 3, 9]
    falling = LearnedOrder()
    falling.learn([9, 3, 1, 0], frozenset({2}), falls=True)
    falling.learn([9, 2, 0], frozenset({1, 3}), falls=True)
    assert falling.without(frozenset()) == [9, 3, 2, 1, 0]
    falling.learn([9, 0, 2, 0], frozenset(), falls=True)
    assert falling.without({9}) == [0, 2, 0], "what a whole pass shows replaces the rest"


def _trained(stage, accumulation, keeps, **config):
    """Dropped layers, losses and weights of seven steps, of the engine and of plain torch with the same draws."""
    zero = {**SHARDED, **({"stage3_max_reuse_distance": 10**9} if keeps else {})} if stage == 3 else {}
    model, plain = tower(), tower()
    deepspeed.progressive_layer_drop(model, "layers")
    drawn = deepspeed.progressive_layer_drop(plain, "layers")
    optimizer = adamw(plain)
    engine = engine_of(model, stage, zero=zero, accumulation=accumulation, progressive_layer_drop=FAST, **config)
    layers = {
        bucket.index: {int(tile.name.split(".")[1]) if "layers" in tile.name else -1 for tile in bucket.layout.tiles}
        for bucket in engine._runtime.buckets
    }
    sizes = {index: bucket.layout.numel * bucket.dtype.itemsize for index, bucket in enumerate(engine._runtime.buckets)}
    found, exchanges = [], []
    collect = engine._runtime.agreement.collect

    def counted_collect(*wish, **options):
        exchanges.append(step)
        return collect(*wish, **options)

    engine._runtime.agreement.collect = counted_collect
    theta = ProgressiveLayerDrop(FAST["theta"], FAST["gamma"])
    for step in range(7):
        for micro in range(accumulation):
            moment = step * accumulation + micro
            with counted() as traffic:
                loss = engine(inputs(step, micro, rank()))
                engine.backward(loss)
            gathered = traffic.requested["all_gather"].nbytes if "all_gather" in traffic.requested else 0
            dropped = droppable_blocks(model)[0][0].dropped
            theta.update_state(max(step - 1, 0))
            assert engine.get_pld_theta() == theta.get_theta()
            assert drawn.draw(theta.get_theta(), moment, 0, 0) == dropped
            parts = [plain(inputs(step, micro, each)) for each in range(2)]
            (sum(parts) / 2 / accumulation).backward()
            assert loss.item() == pytest.approx(parts[rank()].item(), rel=1e-5)
            if stage == 3:
                used = sum(size for index, size in sizes.items() if not layers[index] <= dropped)
                assert gathered <= 2 * used, (step, sorted(dropped), gathered, used)
                found.append((len(dropped), gathered / used))
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
        params = full_params(engine)
        for name, value in plain.named_parameters():
            torch.testing.assert_close(params[name], value.detach(), rtol=1e-5, atol=1e-6)
    assert droppable_blocks(model)[0][0].kept_share[3] < 1
    assert set(exchanges) <= {0}, "later passes follow the rest of the order that the first step has shown"
    engine.eval()
    plain.eval()
    with torch.no_grad():
        assert engine(inputs(9)).item() == pytest.approx(plain(inputs(9)).item(), rel=1e-5)
    engine.destroy()
    return found


def _each_stage():
    return [_trained(*case) for case in ((0, 1, False), (1, 2, False), (2, 1, False), (3, 2, False), (3, 1, True))]


def test_every_stage_trains_as_plain_torch_and_gathers_nothing_for_a_dropped_layer():
    *_, thrice, kept = run_ranks(_each_stage, 2)[0]
    for found in (thrice, kept):
        assert sum(dropped for dropped, _ in found) >= 3, "something was dropped"


class Asked(Tower):
    """Drops layers in its own forward."""

    def forward(self, x, progressive_layer_drop=False, pld_theta=1.0):
        self.requested = (progressive_layer_drop, pld_theta)
        return super().forward(x)


def _keywords(folder):
    def started():
        return engine_of(Asked(), 2, progressive_layer_drop={"enabled": True, "theta": 0.5, "gamma": 0.1})

    engine = started()
    seen = []
    for step in range(4):
        engine.backward(engine(inputs(step)))
        seen.append(engine.module.requested)
        engine.step()
        assert engine.get_pld_theta() == 0.5 * numpy.exp(-0.1 * step) + 0.5
    engine.save_checkpoint(folder)
    engine.eval()
    engine(inputs(1))
    assert engine.module.requested == (False, 1.0)
    assert engine.pld_enabled() and engine.pld_params() == {"theta": 0.5, "gamma": 0.1}
    assert (engine.pld_theta(), engine.pld_gamma()) == (0.5, 0.1)
    again = started()
    again.load_checkpoint(folder)
    assert again.get_pld_theta() == 0.5 * numpy.exp(-0.1 * 3) + 0.5
    with pytest.raises(DeepSpeedConfigError, match="does not take progressive_layer_drop and pld_theta; call deepsp"):
        engine_of(tower(), 2, progressive_layer_drop={"enabled": True})
    assert engine_of(tower(), 0).get_pld_theta() is None
    return seen


def test_a_model_that_drops_by_itself_gets_theta(tmp_path):
    seen = run_ranks(_keywords, 1, tmp_path)[0]
    assert seen == [(True, 1.0), (True, 1.0), *((True, 0.5 * numpy.exp(-0.1 * step) + 0.5) for step in (1, 2))]


# Dropped layers in models of Transformers: at stage 3, with activation checkpointing, and gone in evaluation.


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 32}


def _model(family: str) -> tuple[Any, str]:
    if family == "llama":
        return causal_model(**SIZES), "model.layers"
    if family == "bert":
        return masked_model(**SIZES), "bert.encoder.layer"
    return causal_model("GPT2", n_embd=16, n_layer=4, n_head=2, vocab_size=32, **NO_DROPOUT), "transformer.h"


def _losses(family: str, checkpointed: bool) -> tuple[list[float], list[int], list[float]]:
    model, blocks = _model(family)
    deepspeed.progressive_layer_drop(model, blocks)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    section = {"enabled": True, "theta": 0.2, "gamma": 5.0}
    engine = engine_of(model, 3, progressive_layer_drop=section)
    losses, dropped, gathered = [], [], []
    for step in range(10):
        tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
        with counted() as traffic:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
        gathered.append(traffic.requested["all_gather"].nbytes)
        engine.step()
        losses.append(loss.item())
        dropped.append(len(droppable_blocks(model)[0][0].dropped))
    engine.eval()
    with torch.no_grad():
        losses.append(engine(input_ids=tokens, labels=tokens).loss.item())
    engine.destroy()
    return losses, dropped, gathered


def _both(family: str) -> list[Any]:
    return [_losses(family, False), _losses(family, True)]


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_layers_of_transformers(family):
    (plain, dropped, gathered), (recomputed, also_dropped, _) = run_ranks(_both, 2, family)[0]
    assert recomputed == pytest.approx(plain, rel=1e-5) and dropped == also_dropped
    assert sum(dropped) >= 3
    by_number = dict(zip(dropped, gathered, strict=True))
    numbers = sorted(by_number)
    assert [by_number[number] for number in numbers] == sorted(by_number.values(), reverse=True)
