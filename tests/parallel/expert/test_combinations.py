"""Expert layers together with everything else: precisions, accumulation by hand, frozen experts, evaluation."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.base.counters import counted
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.engine.support import WIDTH, adamw, engine_of, rank, same_on_all_ranks
from tests.harness import run_ranks
from tests.parallel.expert.models import batch, build
from tests.parallel.expert.test_auto import config
from tests.parallel.expert.test_layer import EXPERTS, Net, distinguished, logical, tokens


def _net(ep_size: int, **options: Any) -> Net:
    model = Net((ep_size, ep_size), **options)
    distinguished(model)
    return model


def _losses(engine: Any, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(10 * step + rank())
        loss = engine(tokens(step, 0, rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _precisions() -> None:
    for stage, section in ((1, {"bf16": {"enabled": True}}), (3, {"fp16": {"enabled": True, "loss_scale": 64}})):
        found = [_losses(engine_of(_net(ep_size), stage, **section)) for ep_size in (1, 2)]
        assert found[0] == pytest.approx(found[1], rel=2e-2)
    # One rank's overflow skips everybody's step, experts that it does not have included.
    engine = engine_of(_net(2), 2, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    before = [safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]
    for boost in (float("inf"), 1.0):
        engine.backward(engine(tokens(0, 0, rank())) * (boost if rank() == 1 else 1.0))
        engine.step()
        after = [safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]
        assert all(map(torch.equal, before, after)) == (boost != 1.0)
    assert same_on_all_ranks([engine.optimizer.loss_scale, engine.get_global_grad_norm()])


def _autocast() -> None:
    section = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    found = [_losses(engine_of(_net(ep_size), 2, **section)) for ep_size in (1, 2)]
    assert found[0] == pytest.approx(found[1], rel=2e-2)


def _no_sync() -> None:
    engines = [engine_of(_net(2), 1, accumulation=accumulation) for accumulation in (1, 2)]
    for step in range(2):
        for micro in range(2):
            for engine in engines:  # two models with experts, turn by turn
                torch.manual_seed(10 * step + micro + rank())
                loss = engine(tokens(step, micro, rank()))
                if engine is engines[0] and micro == 0:
                    with engine.no_sync():
                        engine.backward(loss / 2)
                elif engine is engines[0]:
                    engine.backward(loss / 2)
                    engine.step()
                else:
                    engine.backward(loss)
                    engine.step()
    for one, other in zip(*(engine.module.parameters() for engine in engines), strict=True):
        torch.testing.assert_close(safe_get_full_fp32_param(one), safe_get_full_fp32_param(other), rtol=1e-5, atol=1e-6)


def _unused() -> None:
    model = _net(2, k=1, drop_tokens=False)
    with torch.no_grad():
        for block in model.blocks:
            block.deepspeed_moe.gate.wg.weight.zero_()  # equal scores: everybody goes to the first expert
    engine = engine_of(model, 2)
    names = logical(engine.module)
    before = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in names.items()}
    engine.backward(engine(tokens(0, 0, rank())))
    engine.step()
    for name, parameter in names.items():
        is_idle = name.partition("deepspeed_experts.")[2].split(".")[0] not in ("", "0")
        assert torch.equal(before[name], safe_get_full_fp32_param(parameter)) == is_idle, name
        assert (safe_get_full_optimizer_state(parameter, "exp_avg") is None) == is_idle, name


def _evaluates() -> None:
    for stage in (0, 3):
        engine = engine_of(_net(2, k=2, noisy_gate_policy="Jitter"), stage)
        engine.eval()
        with torch.no_grad():
            for prompt, decode in ((7 if rank() == 0 else 2, 5), (1, 2)):
                x = torch.randn(prompt, WIDTH, generator=torch.Generator().manual_seed(rank()))
                first = engine(x)
                assert torch.equal(first, engine(x)), "evaluation draws nothing"
                for _ in range(decode):
                    engine(x[-1:])
        engine.destroy()


def _stages_and_sizes() -> None:
    moe, plain = Net((2, 1)), nn.Linear(2, 2)
    assert has_moe_layers(moe) == (True, EXPERTS) and has_moe_layers(plain) == (False, 0)
    with pytest.raises(DeepSpeedConfigError, match="ep_size 4: the 2 ranks"):
        engine_of(Net((4, 4)), 1)
    engine = engine_of(moe, 1)
    assert engine.has_moe_layers and engine.num_experts == [EXPERTS, EXPERTS] and len(engine.gate_modules) == 2
    assert dist.get_world_size(engine.expert_parallel_group["ep_size_2"]) == 2
    assert groups._get_expert_data_parallel_world_size("ep_size_2") == 1


def _traffic() -> None:
    """Bytes sent: each token once to the other rank and back, with pairs of routes, whatever the capacity."""
    torch.manual_seed(rank())
    layer = MoE(8, nn.Linear(8, 8), 4, ep_size=2, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
    layer.set_deepspeed_parallelism()
    x = torch.randn(64, 8, requires_grad=True)
    torch.manual_seed(0)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(torch.randn(4, 8))
    with counted() as traffic:
        out, _, counts = layer(x)
        out.sum().backward()
    away = int(counts[2:].sum() if rank() == 0 else counts[:2].sum())
    is_away = layer.deepspeed_moe.gate.wg(x).topk(2).indices // 2 != rank()
    assert away == is_away.sum()
    result = [None, None]
    dist.all_gather_object(result, int(is_away.any(1).sum()) + -(-16 * away // 32))
    # Forward: tokens out (mine away), results back (what came); backward the same again; and one exchange of counts.
    assert traffic.requested_along["all_to_all", "expert"].nbytes == 2 * sum(result) * 8 * 4 + 3 * 8
    assert traffic.requested_along["all_to_all", "expert"].calls == 5
    assert 0 < away < 128


def _with_adapters() -> None:
    peft = pytest.importorskip("peft")
    losses = []
    for ep_size in (1, 2):
        model = peft.get_peft_model(build("mixtral"), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.1)
        engine = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01),
            config=config(3, ep_size),
        )[0]
        found = []
        for step in range(3):
            loss = engine(**batch(step, rank())).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0][0] != losses[0][2]


def _built_inside_init() -> None:
    with deepspeed.zero.Init():
        model = Net((2, 2))
    experts = [p for p in model.parameters() if is_moe_param(p)]
    assert experts and all(parameter.ds_zero_partition_world_size == 1 for parameter in experts)
    engine, plain = engine_of(model, 3), engine_of(Net((2, 2)), 2)
    assert _losses(engine) == pytest.approx(_losses(plain), abs=1e-6)


BODIES = [
    _precisions, _autocast, _no_sync, _unused, _evaluates, _stages_and_sizes, _traffic, _with_adapters,
    _built_inside_init,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=[body.__name__.strip("_") for body in BODIES])
def test_on_two_ranks(body: Any) -> None:
    run_ranks(body, 2)


def test_param_groups() -> None:
    model = Net((1, 1))
    for block, name in zip(model.blocks, ("ep_size_2", "ep_size_4"), strict=True):
        for parameter in block.deepspeed_moe.experts.parameters():
            parameter.group_name = name
    shared, experts = split_params_into_shared_and_expert_params(model.parameters())
    assert len(experts) == 2 * EXPERTS * 4 and len(shared) == 6
    given = {"params": list(model.parameters()), "lr": 0.5, "weight_decay": 0.1}
    made = split_params_into_different_moe_groups_for_optimizer(given)
    assert [group.get("name") for group in made] == [None, "ep_size_2", "ep_size_4"]
    assert made[0] is given and made[0]["params"] == shared and all(group["lr"] == 0.5 for group in made)
    small = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters())}, 100)
    assert all(group["params"] and sum(p.numel() for p in group["params"]) <= 100 for group in small[1:])
    assert len({group["name"] for group in small[1:]}) == len(small) - 1
    assert sum(len(group["params"]) for group in small) == len(list(model.parameters()))
    assert len(configure_moe_param_groups(model.parameters())) == 3
    (alone,) = configure_moe_param_groups([{"params": shared[0]}])  # torch takes a single tensor too
    assert len(alone["params"]) == 1 and alone["params"][0] is shared[0]
    assert adamw(model) is not None
    torch.optim.AdamW(configure_moe_param_groups(list(model.parameters())))
