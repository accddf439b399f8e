"""MuonClip: the logits of each head that were above the threshold are brought down to it, as by plain torch."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.ops.muon.qk_clip import largest_logits
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import causal_model
from tests.oracle.optimizers import Muon as Reference
from tests.oracle.optimizers import muon_groups

VOCABULARY, SAMPLES, LENGTH, STEPS, THRESHOLD = 19, 12, 7, 3, 0.4
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "shared keys": {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"},
    "own keys": {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_bias": True,
                 "attn_implementation": "eager"},
    "latent": {"family": "DeepseekV3", "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 6,
               "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "n_routed_experts": 4,
               "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2},
}  # fmt: skip
OPTIONS = {"lr": 0.03, "weight_decay": 0.1, "eps": 1e-6}


def _model(kind: str) -> Any:
    given = {**SIZES, **MODELS[kind]}
    model = causal_model(given.pop("family", "Llama"), seed=4, **given)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name and "self_attn" in name:
                parameter.mul_(12)  # logits of different sizes, above the threshold and below
    return model.train()


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and padding masks ``[samples, length]``."""
    made = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=made)
    lengths = torch.randint(2, LENGTH + 1, (SAMPLES,), generator=made)
    return ids, (torch.arange(LENGTH) < lengths[:, None]).long()


def _loss(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    each = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (each * mask[:, 1:]).sum() / (SAMPLES * LENGTH)


def _record(model: Any) -> dict[int, torch.Tensor]:
    """Makes the attention of a model keep the largest logit of each head, by layer; pair by pair, in plain torch."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    kept: dict[int, torch.Tensor] = {}

    def attention(layer: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
        logits = query @ key.mT * scaling
        seen = mask > -1 if mask is not None else torch.ones_like(logits).tril().bool()
        for head in range(query.shape[1]):
            largest = logits[:, head][seen.expand_as(logits)[:, head]].max().detach()
            before = kept.setdefault(layer.layer_idx, torch.full((query.shape[1],), -math.inf))
            before[head] = max(before[head], largest)
        return (logits.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num() @ value).transpose(1, 2), None

    AttentionInterface.register("plain_logits", attention)
    AttentionMaskInterface.register("plain_logits", eager_mask)
    model.set_attn_implementation("plain_logits")
    return kept


def _clip(model: Any, kind: str, kept: dict[int, torch.Tensor]) -> None:
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for head, logit in enumerate(kept[number].tolist()):
            factor = min(1.0, THRESHOLD / logit) if logit > 0 else 1.0
            root = math.sqrt(factor)
            if kind == "latent":
                attention.q_b_proj.weight.data.view(2, 6, -1)[head, :4] *= root
                attention.q_b_proj.weight.data.view(2, 6, -1)[head, 4:] *= factor
                attention.kv_b_proj.weight.data.view(2, 7, -1)[head, :4] *= root
                continue
            of_query = factor if kind == "shared keys" else root
            for parameter in attention.q_proj.parameters():
                parameter.data.view(4, 4, -1)[head] *= of_query
            for parameter in attention.k_proj.parameters() if kind == "own keys" else ():
                parameter.data.view(4, 4, -1)[head] *= root


def _plain(kind: str) -> Any:
    model = _model(kind)
    groups = [{"params": list(model.parameters()), "betas": (0.9, 0.95), "momentum": 0.95, **OPTIONS}]
    optimizer = Reference(list(muon_groups(model, groups)), lr=0.03)
    largest = []
    for step in range(STEPS):
        kept = _record(model)
        _loss(model, *_batch(step)).backward()
        optimizer.step()
        _clip(model, kind, kept)
        optimizer.zero_grad()
        logits = torch.cat([kept[number] for number in sorted(kept)])
        largest.append((logits.max().item(), int((logits > THRESHOLD).sum())))
    return largest, {name: value.detach().clone() for name, value in model.named_parameters()}


def _train(kind: str, stage: int, accumulation: int, more: dict[str, Any]) -> Any:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size() // accumulation,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Muon", "params": {**OPTIONS, "qk_clip_threshold": THRESHOLD}},
        "zero_optimization": zero,
        **more,
    }
    engine, *_ = deepspeed.initialize(model=_model(kind), config=config)
    largest = []
    for step in range(STEPS):
        mine = [part.chunk(dist.get_world_size())[dist.get_rank()].chunk(accumulation) for part in _batch(step)]
        for ids, mask in zip(*mine, strict=True):
            loss = _loss(engine, ids, mask) * accumulation * dist.get_world_size()
            engine.backward(loss)
            engine.step()
        hooks = engine._hooks.get("deepspeed.ops.muon.feature")
        largest.append(tuple(value for _, value in hooks.events()))
    return largest, {name: value.clone() for name, value in engine.iter_full("fp32")}


def _compare(kind: str, cells: list[Any]) -> None:
    logits, weights = _plain(kind)
    heads = 2 * MODELS[kind]["num_attention_heads"]
    assert any(0 < clipped < heads for _, clipped in logits), logits  # not only none or all
    for stage, accumulation, more in cells:
        found, values = _train(kind, stage, accumulation, dict(more))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(logits, dtype=torch.float32), rtol=1e-3, atol=0)
        for name, value in values.items():
            torch.testing.assert_close(value, weights[name], rtol=2e-3, atol=2e-4, msg=f"{kind}, {stage}: {name}")


OFFLOAD = {"zero": {"offload_optimizer": {"device": "cpu"}}}
CELLS = {
    1: [("shared keys", [(0, 3, {}), (2, 1, OFFLOAD)]), ("own keys", [(1, 2, {})]), ("latent", [(0, 1, {})])],
    2: [("shared keys", [(3, 3, OFFLOAD)]), ("own keys", [(0, 1, {}), (2, 2, {})]), ("latent", [(1, 2, {})])],
    3: [("own keys", [(1, 2, OFFLOAD), (3, 1, {})]), ("latent", [(3, 1, {}), (2, 4, {})])],
}


def _kinds(cells: list[Any]) -> None:
    for kind, some in cells:
        _compare(kind, some)


@needs_transformers
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_equal_to_plain_torch(world):
    run_ranks(_kinds, world, CELLS[world])


@needs_transformers
@on_ranks(1)
def test_logits_end_at_the_threshold() -> None:
    """A step that changes nothing but by clipping brings the logits to the threshold; also where blocks run again."""
    model = _model("own keys")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "Muon", "params": {"lr": 0.0, "qk_clip_threshold": THRESHOLD}},
        "activation_checkpointing": {"recompute_modules": ["core_attn"]},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    plain = _model("own keys")
    kept = _record(plain)
    _loss(plain, *_batch(0))
    engine.backward(_loss(engine, *_batch(0)))
    engine.step()
    engine.eval()
    _loss(engine, *_batch(1))  # evaluation is not measured
    engine.destroy()
    again = _record(model)
    _loss(model, *_batch(0))
    torch.testing.assert_close(again[0], kept[0].clamp(max=THRESHOLD), rtol=1e-4, atol=1e-5)


def test_logits_in_blocks(monkeypatch):
    torch.manual_seed(1)
    query, key = torch.randn(2, 4, 9, 3), torch.randn(2, 2, 9, 3)
    logits = query @ key.repeat_interleave(2, 1).mT / math.sqrt(3)
    positions = torch.arange(9)
    window = (positions <= positions[:, None]) & (positions > positions[:, None] - 3)
    padding = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    additive = torch.zeros(2, 1, 9, 9).masked_fill(~window, torch.finfo(torch.float32).min)
    cells = [
        (None, False, None, torch.ones(9, 9).bool()),
        (None, True, None, torch.ones(9, 9).tril().bool()),
        (None, True, 3, window),
        (padding, True, None, torch.ones(9, 9).tril().bool() & padding[:, None, None].bool()),
        (window.expand(2, 1, 9, 9), True, None, window),
        (additive, True, None, window),
    ]
    for numel in (1, 200, 1 << 20):
        monkeypatch.setattr("deepspeed.ops.muon.qk_clip._BLOCK_NUMEL", numel)
        for mask, is_causal, width, seen in cells:
            expected = logits.masked_fill(~seen, -math.inf).amax(dim=(0, 2, 3))
            found = largest_logits(query, key, mask, scale=None, is_causal=is_causal, window=width)
            torch.testing.assert_close(found, expected)


def _config(**more: Any) -> dict[str, Any]:
    params = {"lr": 0.01, "qk_clip_threshold": THRESHOLD}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Muon", "params": params}, **more}


@needs_transformers
@on_ranks(1)
def test_what_cannot_be_clipped_is_refused_by_name() -> None:
    from deepspeed.ops.muon import Muon

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    normalized = causal_model("Qwen3", **SIZES, **heads)
    with pytest.raises(DeepSpeedConfigError, match=r"self_attn \(Qwen3Attention\) normalizes .*\(q_norm, k_norm\)"):
        deepspeed.initialize(model=normalized, config=_config())
    with pytest.raises(DeepSpeedConfigError, match="expected a model of Transformers, found Linear"):
        deepspeed.initialize(model=nn.Linear(2, 2), config=_config())
    with pytest.raises(DeepSpeedConfigError, match=r"expected Muon\(.*\) itself, found a callable"):
        deepspeed.initialize(
            model=_model("own keys"),
            optimizer=lambda parameters: Muon(parameters, qk_clip_threshold=1.0),
            config={"train_micro_batch_size_per_gpu": 2},
        )
    fused = causal_model("GPTNeoX", **SIZES, num_attention_heads=4)
    engine, *_ = deepspeed.initialize(model=fused, config=_config())
    with pytest.raises(DeepSpeedConfigError, match="GPTNeoXAttention has no layers q_proj and k_proj"):
        engine(input_ids=torch.ones(2, 3, dtype=torch.long))
    engine.destroy()
    model = _model("own keys")
    engine, *_ = deepspeed.initialize(model=model, config=_config())
    engine.eval()
    engine.backward(_loss(engine, *_batch(0)))
    with pytest.raises(CallOrderError, match="no attention layer was measured"):
        engine.step()
    engine.destroy()
    weight = nn.Parameter(torch.randn(3, 2))
    weight.grad = torch.randn(3, 2)
    with pytest.raises(RuntimeError, match="attention logits are not measured"):
        Muon([weight], qk_clip_threshold=1.0).step()
