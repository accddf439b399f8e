"""Transformers models whose experts are spread by the configuration equal the same models in plain torch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.moe.ep_experts import EXPERT_ACTIVATIONS, get_expert_activation, register_expert_activation
from deepspeed.utils import safe_get_full_fp32_param
from tests.engine.support import SHARDED, rank
from tests.harness import on_ranks, run_ranks
from tests.harness.training import Expected, plain_run, train_like
from tests.parallel.expert.models import CONFIGS, batch, build

STEPS = 3


ADAMW = {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW)


def config(stage: int, ep_size: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, **(SHARDED if stage == 3 else {})},
        "expert_parallel": {"enabled": True, "autoep_size": ep_size},
        **more,
    }


def loss_of(model: Any, step: int, data: int) -> torch.Tensor:
    return model(**batch(step, data)).loss


def plain(kind: str, world: int, steps: int = STEPS) -> Expected:
    return plain_run(build(kind), steps, world, loss=loss_of, optimizer=lambda given: torch.optim.AdamW(given, **ADAMW))


def of_this_rank(
    parameter: nn.Parameter, whole: torch.Tensor, ep_size: int, far: bool = False, experts: int | None = None
) -> torch.Tensor:
    """This rank's part of a stack. Rows without expert (of LongCat-Flash) come last and are divided, too."""
    if getattr(parameter, "allreduce", True):
        return whole
    place = rank() // (dist.get_world_size() // ep_size) if far else rank() % ep_size
    parts = torch.tensor_split(whole, [len(whole) if experts is None else experts])
    return torch.cat([part.chunk(ep_size)[place] for part in parts if len(part)])


def check(
    kind: str,
    world: int,
    stage: int,
    ep_size: int,
    *,
    own_optimizer: bool = True,
    init: bool = False,
    far: bool = False,
    **sections: Any,
) -> None:
    expected_run = plain(kind, world)
    wanted = expected_run.state
    settings = config(stage, ep_size, use_data_before_expert_parallelism=far, **sections)
    if init:
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = build(kind)
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            for parameter, value in zip(model.parameters(), build(kind).parameters(), strict=True):
                parameter.data.copy_(value)
    else:
        model = build(kind, seed=rank())  # rank 0's values count
    if not own_optimizer:
        settings["optimizer"] = {"type": "AdamW", "params": ADAMW}
    client = adamw(model) if own_optimizer else None  # built before the experts are cut
    engine = deepspeed.initialize(model=model, optimizer=client, config=settings)[0]
    train_like(engine, expected_run, loss_of, rank(), rel=5e-6, norm_rel=1e-4)
    cut = 0
    for name, parameter in engine.module.named_parameters():
        expected = of_this_rank(parameter, wanted[name], ep_size, far, experts=4)
        cut += len(expected) < len(wanted[name])
        found = safe_get_full_fp32_param(parameter)
        if found is None:
            assert not parameter.requires_grad, name  # frozen ones have no master
            continue
        if not torch.allclose(found, expected, rtol=1e-4, atol=2e-5):
            raise AssertionError(f"{name}: off by {(found - expected).abs().max()}")
    assert cut or ep_size == 1
    engine.destroy()


CELLS = [
    ("mixtral", 0, {}), ("mixtral", 3, {"init": True}), ("qwen3_moe", 3, {}), ("qwen2_moe", 1, {}),
    ("qwen3_5_moe", 2, {"own_optimizer": False}), ("olmoe", 1, {}), ("deepseek_v2", 2, {}),
    ("deepseek_v3", 3, {"own_optimizer": False}), ("gpt_oss", 3, {"init": True}), ("llama4", 2, {}),
]  # fmt: skip


def section(**more: Any) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, "autoep_size": 2, **more}}


def own_activation(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Mixtral's, written otherwise; alpha and limit are the defaults, as neither the module nor its config has them."""
    return gate / (1 + (-gate).exp()) * up * (alpha / 1.702) * (limit / 7)


UNUSUAL = [
    ("longcat_flash", 3, {}), ("inkling", 1, {}), ("minimax_m3", 2, section(preset_model="minimax_m3")),
    ("mixtral", 1, section(expert_activation="of_this_test")), ("qwen3_moe", 3, section(expert_activation="swiglu")),
    ("gpt_oss", 2, section(expert_activation="swiglu_oai")),
]  # fmt: skip


def _all_cells(world: int, ep_size: int, cells: list[Any]) -> None:
    for kind, stage, more in cells:
        try:
            check(kind, world, stage, ep_size, **more)
        except AssertionError as error:
            raise AssertionError(f"{kind}, stage {stage}, {more}: {error}") from None


def test_every_kind_of_model_on_two_ranks() -> None:
    assert {kind for kind, _, _ in CELLS} == set(CONFIGS)
    run_ranks(_all_cells, 2, 2, 2, CELLS, timeout=240)


@on_ranks(2, timeout=240)
def test_zero_experts_shared_experts_a_preset_and_activations() -> None:
    register_expert_activation("of_this_test", own_activation)
    try:
        _all_cells(2, 2, UNUSUAL)
    finally:
        del EXPERT_ACTIVATIONS["of_this_test"]


def test_activations_are_registered_once() -> None:
    gate, up = torch.tensor([-9.0, 0.5, 9.0]), torch.tensor([-8.0, 0.5, 9.0])
    clamped = EXPERT_ACTIVATIONS["swiglu_clamped"].fn(gate, up, 1.0, 7.0)
    torch.testing.assert_close(clamped, nn.functional.silu(gate.clamp(max=7)) * up.clamp(-7, 7))
    found = get_expert_activation("geglu_tanh").fn(gate, up, 1.0, 7.0)
    torch.testing.assert_close(found, nn.functional.gelu(gate, approximate="tanh") * up)
    with pytest.raises(ValueError, match=r"register_expert_activation\('swiglu'\): expected a new name"):
        register_expert_activation("swiglu", own_activation)
    with pytest.raises(ValueError, match="'nothing': expected one of swiglu, .* register it with"):
        get_expert_activation("nothing")


@pytest.mark.slow
def test_every_stage_on_four_ranks() -> None:
    cells = [("mixtral", stage, {"init": stage == 3}) for stage in range(4)]
    run_ranks(_all_cells, 4, 4, 2, cells, timeout=240)
    run_ranks(_all_cells, 4, 4, 2, [("mixtral", 1, {"far": True}), ("mixtral", 3, {"far": True})], timeout=240)
    run_ranks(_all_cells, 4, 4, 4, cells, timeout=240)


@on_ranks(2)
def test_an_optimizer_with_states_of_whole_stacks_is_refused() -> None:
    """Adagrad has states from its first moment; they have the shape of whole stacks."""
    model = build("mixtral")
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    optimizer = torch.optim.Adagrad(model.parameters())
    with pytest.raises(
        DeepSpeedConfigError, match=r"optimizer=<Adagrad>\) has states .* expert_parallel.autoep_size 2"
    ):
        deepspeed.initialize(model=model, optimizer=optimizer, config=config(2))
    assert shapes == {name: parameter.shape for name, parameter in model.named_parameters()}


@on_ranks(2)
def test_unsupported_settings_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    for model, section, words in (
        (nn.Linear(2, 2), {}, "Linear has no module with stacked experts .* build other models with deepspeed.moe"),
        (
            build("mixtral"),
            {"expert_activation": "nothing"},
            "expert_activation: .* expected one of swiglu, ",
        ),
        (
            build("nemotron_h"),
            {"expert_activation": "swiglu"},
            "expected experts with a gate, found 'model.lay",
        ),
        (build("mixtral"), {"preset_model": "qwen3_moe"}, "is for models of type qwen3_moe or qwen2_moe, .*'mixtral'"),
        (
            build("mixtral"),
            {"moe_layer_pattern": "nothing"},
            "matches none of the .* 'model.layers.0.mlp.experts'",
        ),
        (
            build("mixtral", num_local_experts=3),
            {},
            "the 3 experts of 'model.layers.0.mlp.experts' cannot be divided evenly",
        ),
        (
            build("longcat_flash", zero_expert_num=3),
            {},
            "the 7 rows of gate_up_proj, beside 4 experts, of 'model.layers.0.mlp.experts' cannot be divided evenly",
        ),
        (build("jetmoe"), {}, r"has no module with stacked experts .*; it has .*experts' \(JetMoeMoA\)"),
        (
            peft.get_peft_model(build("mixtral"), peft.LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"])),
            {},
            "ParamWrapper adapts the weight 'down_proj' of the experts .*target_modules instead of target_parameters",
        ),
        (build("dbrx"), {}, r"'transformer.blocks.0.ffn.experts' \(DbrxExperts\).* Most models of Transformers 5"),
        (build("doge"), {}, "DogeForCausalLM has no module with stacked experts"),
    ):
        settings = config(1)
        settings["expert_parallel"] |= section
        with pytest.raises(DeepSpeedConfigError, match=words):
            deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)
