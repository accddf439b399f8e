"""Random layerwise token dropping: the schedule, what a layer sees, and training at every stage."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn

from deepspeed.dropping.tokens import Positions, RandomLTDScheduler, TokenDrop, mapped
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.runtime.data_pipeline.data_routing.basic_layer import RandomLayerTokenDrop
from deepspeed.runtime.data_pipeline.data_routing.helper import (
    convert_to_random_ltd,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
)
from tests.engine.support import engine_of
from tests.harness import run_ranks
from tests.harness.toy_models import causal_model

LTD = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_mask_name": "mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 4,
        "max_value": 10,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 6, "seq_per_step": 2},
    },
}
SECTION = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD}}


def test_schedule():
    schedule = RandomLTDScheduler({**LTD, "global_batch_size": 8})
    assert [schedule.get_value(step) for step in range(8)] == [4, 4, 6, 6, 8, 8, 10, 10]
    consumed = 0
    for step in range(8):
        for _ in range(2):  # micro-batches
            schedule.update_seq(step)
        consumed += 8 * (2 * schedule.get_current_seq() + 2 * 10)
        assert schedule.state_dict()["consumed_layer_tokens"] == consumed
        assert schedule.get_total_layer_tokens(step + 1) == consumed
    again = RandomLTDScheduler({**LTD, "global_batch_size": 8})
    again.load_state_dict(schedule.state_dict())
    assert again.state_dict() == schedule.state_dict() and again.get_random_ltd_layer_num() == 2


def test_a_schedule_below_its_granularity_never_gives_nothing():
    settings = {**LTD["random_ltd_schedule"], "min_value": 8, "max_value": 64}
    settings["schedule_config"] = {"require_steps": 10, "seq_per_step": 16}
    schedule = RandomLTDScheduler({**LTD, "random_ltd_schedule": settings, "global_batch_size": 1})
    assert schedule.get_value(0) == 16


class Attention(nn.Module):
    """A causal layer with rotated queries and keys, as tables with or without an axis of samples."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, angles=None, mask=None, positions=None):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if positions is not None:
            angles = positions[..., None] * torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=x.dtype)
        if angles is not None:
            q, k = (
                torch.cat(
                    (
                        t[..., :4] * angles.cos() - t[..., 4:] * angles.sin(),
                        t[..., :4] * angles.sin() + t[..., 4:] * angles.cos(),
                    ),
                    -1,
                )
                for t in (q, k)
            )
        scores = q @ k.transpose(1, 2)
        if mask is None:
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        else:
            causal = mask if mask.dim() < 4 else mask[:, 0]
        scores = scores.masked_fill(~causal, float("-inf"))
        return x + self.out(scores.softmax(-1).nan_to_num() @ v)


def _by_hand(layer, x, kept, whole_mask=None, angles=None):
    """Each sample alone: its kept tokens, their masks and their angles, and the rest passed by."""
    out = x.clone()
    for sample, rows in enumerate(kept):
        mask = None if whole_mask is None else whole_mask[sample, 0][rows][:, rows][None]
        turned = None if angles is None else angles[rows]
        out[sample, rows] = layer(x[sample : sample + 1, rows], angles=turned, mask=mask)[0]
    return out


@pytest.mark.parametrize("given", ["nothing", "mask", "angles", "angles per sample", "positions", "one row"])
def test_a_layer_sees_its_tokens_with_their_masks_and_angles(given):
    torch.manual_seed(0)
    plain, x, count = Attention(), torch.randn(3, 10, 8, requires_grad=True), 6
    layer = RandomLayerTokenDrop(copy.deepcopy(plain))
    assert isinstance(layer, Attention) and list(layer.state_dict()) == list(plain.state_dict())
    assert torch.equal(layer(x), plain(x)), "without a schedule nothing is dropped"
    layer._token_drop = TokenDrop(kept=count, mask_name="mask")
    mask = torch.ones(3, 1, 10, 10, dtype=torch.bool).tril() & (torch.rand(3, 1, 1, 10) < 0.7)
    angles = torch.arange(10.0)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    numbers = torch.arange(10.0)
    arguments = {
        "nothing": {},
        "mask": {"mask": mask},
        "angles": {"angles": angles},
        "angles per sample": {"angles": angles.expand(3, 10, 4)},
        "positions": {"positions": numbers.expand(3, 10)},
        "one row": {"angles": angles[None]},
    }[given]
    torch.manual_seed(7)
    out = layer(x, **arguments)
    torch.manual_seed(7)
    shared = given == "angles"
    kept = Positions.draw(3, 10, count, x.device, is_shared=shared, sequence_first=False).kept
    assert all(row.tolist() == sorted(set(row.tolist())) and len(row) == count for row in kept)
    assert torch.equal(kept[0], kept[1]) == shared
    turns = None if given in ("nothing", "mask") else angles
    expected = _by_hand(plain, x, kept, mask if given == "mask" else None, turns)
    torch.testing.assert_close(out, expected)
    ours, theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected))
    torch.testing.assert_close(ours, theirs)
    layer.eval()
    torch.testing.assert_close(layer(x, **arguments), plain(x, **arguments))


class _Angles(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor


def test_named_tuples_are_cut_and_stay_named():
    positions = Positions.draw(2, 6, 3, torch.device("cpu"), is_shared=True, sequence_first=False)
    table = torch.arange(6.0)[:, None]
    found = mapped(_Angles(table, -table), positions.of_table)
    assert type(found) is _Angles
    torch.testing.assert_close(found.cos, positions.kept[0][:, None].float())
    torch.testing.assert_close(found.sin, -found.cos)


def test_sequences_first():
    torch.manual_seed(0)

    class Shift(nn.Module):
        def forward(self, x, table):
            return x + table, None

    layer = RandomLayerTokenDrop(Shift())
    layer.init_config({"hidden_state_order": "seq_batch_dim"}, type("Three", (), {"get_current_seq": lambda s: 3})(), 0)
    x, table = torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    out, nothing = layer(x, table)
    changed = (out != x).any(-1)
    assert nothing is None and changed.sum(0).tolist() == [3, 3]
    assert torch.equal(out[changed], (x + table)[changed])


def test_padding_masks_and_what_cannot_be_cut():
    kept = Positions(torch.tensor([[0, 2], [1, 3]]), 4, is_shared=False, sequence_first=False)
    padding = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])
    assert kept.of_mask(padding).tolist() == [[1, 1], [0, 1]]
    assert kept.of_mask(padding[:, None, None, :]).tolist() == [[[[1, 1]]], [[[0, 1]]]]
    square = torch.arange(16).view(4, 4)
    assert kept.of_mask(square).tolist() == [[[0, 2], [8, 10]], [[5, 7], [13, 15]]]
    with pytest.raises(ValueError, match="a mask with the 4 positions .* found shape .2, 9."):
        kept.of_mask(torch.ones(2, 9))
    layer = RandomLayerTokenDrop(Attention())
    layer._token_drop = TokenDrop(kept=2)
    with pytest.raises(ValueError, match="the mask mask is a str"):
        layer(torch.randn(2, 4, 8), mask="causal")


def test_transformers_models_with_rotary_angles():
    pytest.importorskip("transformers")
    model = causal_model(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, head_dim=8
    )
    tokens = torch.randint(32, (2, 8))
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    whole = model(input_ids=tokens, attention_mask=mask).logits
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    convert_to_random_ltd(model, LlamaDecoderLayer)
    drop = TokenDrop(kept=8)
    for layer in model.model.layers[1:]:
        layer._token_drop = drop
    torch.testing.assert_close(model(input_ids=tokens, attention_mask=mask).logits, whole)
    seen = []
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((kwargs["hidden_states"], kwargs["position_embeddings"])),
        with_kwargs=True,
    )
    drop.kept = 5
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        loss = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        model.zero_grad()
        loss.backward()
        gradient = model.model.embed_tokens.weight.grad
        assert gradient.isfinite().all()
        gradients.append(gradient.clone())
    torch.testing.assert_close(*gradients)
    hidden, (cos, _) = seen[0]
    assert hidden.shape == (2, 5, 16) and cos.shape == (2, 5, 8) and len(seen) == 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.layers = nn.Linear(3, 8), nn.ModuleList(Attention() for _ in range(4))

    def forward(self, x):
        x = self.first(x.to(self.first.weight.dtype))
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def _trained(folder, stage, **config):
    def step(engine, number):
        for micro in range(2):
            dice = torch.Generator().manual_seed(number * 2 + micro)
            engine.backward(engine(torch.randn(2, 10, 3, generator=dice)))
            engine.step()

    seen = []
    engine = engine_of(Model(), stage, accumulation=2, data_efficiency=SECTION, **config)
    with pytest.raises(CallOrderError, match="no layer drops tokens: call deepspeed.dropping.convert_to_random_ltd"):
        engine(torch.randn(2, 10, 3))
    assert convert_to_random_ltd(engine, Attention) is engine
    engine.module.layers[2].qkv.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    engine.module.layers[3].qkv.register_forward_hook(lambda module, args, out: seen.append(-args[0].shape[1]))
    names = list(dict(engine.module.named_parameters()))
    assert names == list(dict(Model().named_parameters())) and list(save_without_random_ltd(engine.module)) == names
    for number in range(8):
        if number == 3:
            engine.save_checkpoint(folder)
            torch.manual_seed(77)
            random = torch.get_rng_state()
        step(engine, number)
    state = engine.random_ltd_scheduler.state_dict()
    again = engine_of(
        convert_to_random_ltd(Model(), Attention), stage, accumulation=2, data_efficiency=SECTION, **config
    )
    again.load_checkpoint(folder)
    assert again.random_ltd_scheduler.state_dict()["current_steps"] == 2
    torch.set_rng_state(random)
    for number in range(3, 8):
        step(again, number)
    assert again.random_ltd_scheduler.state_dict() == state
    pairs = zip(engine.iter_full("fp32"), again.iter_full("fp32"), strict=True)
    assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)
    assert engine.random_ltd_enabled() and not engine.curriculum_learning_enabled()
    return seen


def _each_stage(folder):
    found = [_trained(folder / str(stage), stage) for stage in range(4)]
    bf16 = _trained(folder / "bf16", 3, bf16={"enabled": True})
    return [*found, bf16]


def test_every_stage_trains_and_resumes_bit_for_bit(tmp_path):
    expected = [pair for kept in (4, 4, 6, 6, 8, 8, 10, 10) for pair in [kept, -10] * 2]
    for seen in run_ranks(_each_stage, 2, tmp_path, timeout=180)[0]:
        assert seen == expected


def _wrong():
    other = {**SECTION, "data_routing": {"enabled": True, "random_ltd": {**LTD, "random_ltd_layer_id": [1, 9]}}}
    with pytest.raises(ValueError, match=r"found \[9\]; converted layers are layers.0, layers.1"):
        convert_to_random_ltd(engine_of(Model(), 0, data_efficiency=other), Attention)
    with pytest.raises(CallOrderError, match="random_ltd_initialize: enable data_efficiency"):
        convert_to_random_ltd(engine_of(Model(), 0), Attention)
    with pytest.raises(DeepSpeedConfigError, match="random_ltd_layer_num: 3 is not the length of random_ltd_layer_id"):
        bad = {**SECTION, "data_routing": {"enabled": True, "random_ltd": {**LTD, "random_ltd_layer_num": 3}}}
        engine_of(Model(), 0, data_efficiency=bad)


def test_what_is_wrong_is_named():
    run_ranks(_wrong, 1)
    with pytest.raises(ValueError, match="no layer of the class Conv1d"):
        convert_to_random_ltd(Model(), nn.Conv1d)
    published = {"layers.0.random_ltd_layer.out.bias": 1, "first.bias": 2}
    assert remove_random_ltd_state_dict(published) == {"layers.0.out.bias": 1, "first.bias": 2}
