"""Masters: parameters of a run, and masters and states in 16 bits."""

import re

import pytest
import torch
from torch import nn

from deepspeed.zero.update.masters import _scalar_state
from tests.harness import on_ranks, run_ranks

# Which parameters may share a run of a master bucket (``zero.update.masters``).


def test_parameters_of_one_run_share_step_counts_and_numbers_but_no_tensors_of_elements() -> None:
    moments = {"exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    three = _scalar_state({"step": torch.tensor(3.0), "beta": 0.5, **moments})
    assert three == (("beta", 0.5), ("step", 3.0))
    assert three == _scalar_state({"beta": 0.5, "step": 3, "exp_avg": torch.zeros(9)}), "an int step is the same"
    assert three != _scalar_state({"step": torch.tensor(4.0), "beta": 0.5, **moments})
    assert _scalar_state({}) is None and _scalar_state(None) is None
    assert _scalar_state({"momentum_buffer": torch.ones(4)}) == ()


# 16-bit masters and moments: the same bits at every stage and number of ranks, saved and loaded anywhere, counted.


STEPS = 4


class Awkward(nn.Module):
    """Odd sizes, tied weights, a frozen and an unused parameter."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embed = nn.Embedding(37, 19)
        self.block = nn.Sequential(nn.Linear(19, 53), nn.Tanh(), nn.Linear(53, 19))
        self.frozen = nn.Linear(19, 19).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(19, 37, bias=False)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.head(hidden + self.block(hidden) + self.frozen(hidden))


def groups_of(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def config_of(stage, dtype="bf16", states=True, offload=False, accumulation=1, **more):
    section = {"enabled": True, f"{dtype}_master_weights_and_grads": True}
    if dtype == "bf16":
        section["bf16_optimizer_states"] = states
    else:
        section["initial_scale_power"] = 4
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "gradient_clipping": 0.7,
        dtype: section,
        "zero_optimization": zero,
        **more,
    }


def engine_of(config, trains_unused=True):
    import deepspeed

    model = Awkward()
    model.unused.requires_grad_(trains_unused)
    return deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)[0]


def train(engine, begin, end, accumulation=1):
    """Every rank gets the same samples, so that the mean over ranks is exact."""
    for step in range(begin, end):
        for part in range(accumulation):
            tokens = torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(100 * step + part))
            loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())
            engine.backward(loss)
            engine.step()


def weights_of(engine):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[name] = safe_get_full_fp32_param(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                state = safe_get_full_optimizer_state(parameter, key)
                if state is not None:
                    found[f"{name}.{key}"] = state
    return found


def on_rank(settings, accumulation):
    engine = engine_of(config_of(accumulation=accumulation, **settings))
    train(engine, 0, STEPS, accumulation)
    found = weights_of(engine)
    engine.destroy()
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def reference():
    return {accumulation: run_ranks(on_rank, 1, {"stage": 0}, accumulation)[0] for accumulation in (1, 3)}


@pytest.mark.parametrize(
    ("world_size", "stage", "offload", "accumulation"),
    [
        (1, 3, True, 1),
        (2, 0, False, 1),
        (2, 1, True, 1),
        (2, 3, False, 3),
        (3, 2, False, 1),
        (3, 3, True, 1),
        (4, 1, False, 3),
        (4, 2, True, 1),
        (4, 3, False, 1),
    ],
)
def test_every_topology_gives_the_same_bits(reference, world_size, stage, offload, accumulation):
    for found in run_ranks(on_rank, world_size, {"stage": stage, "offload": offload}, accumulation):
        same(found, reference[accumulation])


def test_states_have_the_requested_dtype(reference):
    assert reference[1]["embed.weight.exp_avg_sq"].dtype == torch.bfloat16
    found = run_ranks(on_rank, 1, {"stage": 2, "states": False}, 1)[0]
    assert found["embed.weight.exp_avg_sq"].dtype == torch.float32


def rank_in_fp16(stage, offload):
    engine = engine_of(config_of(stage, "fp16", offload=offload))
    train(engine, 0, STEPS)
    return weights_of(engine), engine.optimizer.loss_scale


def test_fp16_masters():
    (alone, scale), *_ = run_ranks(rank_in_fp16, 1, 0, False)
    assert alone["embed.weight.exp_avg"].dtype == torch.float32 and scale == 16
    for found, _ in run_ranks(rank_in_fp16, 2, 2, True):
        same(found, alone)


def save_rank(folder, stage):
    engine = engine_of(config_of(stage))
    train(engine, 0, 2)
    engine.save_checkpoint(folder)


def resume_rank(folder, stage, offload):
    engine = engine_of(config_of(stage, offload=offload))
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    train(engine, 2, STEPS)
    return weights_of(engine)


def resume_in_fp32(folder):
    config = config_of(1)
    config["bf16"] = {"enabled": True}
    engine = engine_of(config)
    engine.load_checkpoint(folder)
    before = weights_of(engine)
    train(engine, 2, STEPS)
    return before


def test_a_checkpoint_continues_anywhere_with_the_same_bits(reference, tmp_path):
    run_ranks(save_rank, 2, str(tmp_path), 3)
    for found in run_ranks(resume_rank, 3, str(tmp_path), 1, True):
        same(found, reference[1])
    same(run_ranks(resume_rank, 1, str(tmp_path), 0, False)[0], reference[1])
    for found in run_ranks(resume_in_fp32, 2, str(tmp_path)):
        assert found["embed.weight.exp_avg"].dtype == torch.float32, "states are widened for fp32 masters"


def counted(stage, offload, accumulation):
    from deepspeed.zero.placement import Tier
    from deepspeed.zero.storage import StorageKind

    engine = engine_of(config_of(stage, offload=offload, accumulation=accumulation), trains_unused=False)
    memory_tracker, buckets = engine._runtime.memory_tracker, engine._runtime.buckets
    train(engine, 0, 1, accumulation)
    tokens = torch.zeros(2, 5, dtype=torch.long)
    for part in range(accumulation):
        engine.backward(engine(tokens).float().square().mean())
        if part + 1 < accumulation:
            engine.step()
    gradients = memory_tracker.live_at(Tier.HOST if offload else Tier.DEVICE)
    live = {kind: sum(memory_tracker.live(kind, tier) for tier in Tier) for kind in StorageKind}
    engine.step()
    psi = sum(bucket.layout.numel for bucket in buckets if bucket.layout.trainable)
    report = engine.memory_report()
    assert all(found == formula for _, found, formula, _ in report), report
    assert all(row["master"] == row["state"] == ["torch.bfloat16"] for row in engine.precision_report())
    assert gradients
    states = sum(memory_tracker.live(StorageKind.OPTIMIZER, tier) for tier in Tier)
    return psi, live[StorageKind.MASTER], live[StorageKind.GRADIENT], states


@pytest.mark.parametrize(
    ("stage", "offload", "accumulation"), [(0, False, 1), (1, False, 3), (2, True, 1), (2, False, 3), (3, False, 1)]
)
def test_bytes_are_counted(stage, offload, accumulation):
    """Two bytes for each gradient and each moment, none for masters: they are the compute parameters."""
    for psi, master, gradient, optimizer in run_ranks(counted, 2, stage, offload, accumulation):
        owned = psi // (2 if stage else 1)
        assert (master, gradient, optimizer) == (0, 2 * owned, 4 * owned)


NARROW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def test_masters_on_the_host_of_a_device(tmp_path):
    """There they are no longer the compute parameters, and updates are cut into chunks."""
    from tests.device.support import engine_at, step
    from tests.harness.device import simulated_device

    def trained(stage, tier):
        with simulated_device(ranks=1):
            engine = engine_at(stage, tier, tmp_path, precision="fp32", bf16=NARROW)
            for number in range(3):
                step(engine, number)
            on_host = [row for row in engine.memory_report() if row[0].endswith("(host)")]
            assert all(found == formula for _, found, formula, _ in on_host), on_host
            found = {name: value.cpu() for name, value in engine.iter_full("fp32")}
            engine.destroy()
        return found

    expected = trained(0, "device")
    for stage, tier in ((2, "optimizer on the host"), (3, "both on the host")):
        same(trained(stage, tier), expected)


def test_a_plan_counts_them_too():
    import deepspeed
    from deepspeed.zero.storage import StorageKind
    from tests.plan.requests import CONFIG, SHAPE

    plans = [
        deepspeed.plan(SHAPE, {**CONFIG, "bf16": bf16}, devices_per_node=2, sequence_length=32)
        for bf16 in ({"enabled": True}, NARROW)
    ]
    held = [{kind: n for (kind, _), n in made.simulated.kind_peaks.items()} for made in plans]
    assert held[0][StorageKind.MASTER] and not held[1].get(StorageKind.MASTER)
    assert held[0][StorageKind.OPTIMIZER] == 2 * held[1][StorageKind.OPTIMIZER]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(
            ({"optimizer": {"type": name}}, f"{kind}.*16-bit masters|16-bit masters.*{kind}")
            for name, kind in (("Muon", "Muon"), ("Lamb", "FusedLamb"), ("RMSprop", "RMSprop"), ("OneBitAdam",) * 2)
        ),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "swap"}}, 'offload to "nvme"'),
        (
            {"offload_optimizer": {"device": "cpu", "super_offload": True}},
            "offload_optimizer.super_offload: a second set of masters",
        ),
        (
            {"communication_compression": {"islands": {"size": 1, "sync_every": 2}}},
            "bf16_master_weights_and_grads.*communication_compression.islands"
            "|communication_compression.islands.*bf16_master_weights_and_grads",
        ),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16_master_weights_and_grads: true"),
    ],
)
@on_ranks(1)
def test_what_is_not_supported_is_refused_by_name(change, words):
    import deepspeed
    from deepspeed.errors import DeepSpeedConfigError

    config = config_of(1 if "optimizer" not in change else 0)
    for key, section in change.items():
        if key == "offload_optimizer":
            config["zero_optimization"][key] = section
        else:
            config[key] = section
    model = Awkward()
    with pytest.raises(DeepSpeedConfigError) as caught:
        deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)
    assert re.search(words, str(caught.value), re.DOTALL), caught.value


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, True), (3, False)])
@on_ranks(2)
def test_gradients_too_small_for_fp16_pass_through_accessors(stage, offload):
    """Gradients that are numbers of fp16 only while they are multiplied by the loss scale."""
    from deepspeed.utils import (
        safe_get_full_grad,
        safe_get_local_grad,
        safe_set_full_grad,
        safe_set_local_grad,
        safe_update_full_grad_vectorized,
    )

    config = config_of(stage, "fp16", offload=offload)
    config["fp16"]["initial_scale_power"] = 16
    engine = engine_of(config)
    tokens = torch.arange(10).view(2, 5)
    engine.backward(engine(tokens).float().square().mean() * 1e-6)
    parameter = engine.module.block[0].weight
    expected = safe_get_full_grad(parameter)
    assert expected.dtype == torch.float32 and 0 < expected.abs().max() < 2.0**-25
    safe_set_full_grad(parameter, expected)
    torch.testing.assert_close(safe_get_full_grad(parameter), expected, rtol=0, atol=0)
    safe_set_local_grad(parameter, safe_get_local_grad(parameter))
    safe_update_full_grad_vectorized([parameter], lambda gradient, _: gradient * 2)
    torch.testing.assert_close(safe_get_full_grad(parameter), expected * 2, rtol=0, atol=0)
    torch.testing.assert_close(dict(engine.iter_full("grad"))["block.0.weight"], expected * 2, rtol=0, atol=0)


def with_fp32_block(stage, offload, accumulation):
    config = config_of(stage, offload=offload, accumulation=accumulation)
    config["data_types"] = {"keep_in_fp32_modules": ["block"]}
    engine = engine_of(config, trains_unused=False)
    block = engine.module.block
    block.register_forward_pre_hook(lambda _, given: (given[0].float(),))
    block.register_forward_hook(lambda _, given, found: found.bfloat16())
    for part in range(accumulation):
        tokens = torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(part))
        engine.backward(nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten()))
        if part + 1 < accumulation:
            engine.step()
    gradients = dict(engine.iter_full("grad"))
    engine.step()
    report = engine.memory_report()
    assert all(found == formula for _, found, formula, _ in report), report
    engine.destroy()
    return gradients["block.0.weight"], gradients["embed.weight"]


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, True), (3, False)])
def test_modules_that_stay_fp32_keep_their_gradients(stage, offload):
    for accumulation in (1, 3):
        for wide, narrow in run_ranks(with_fp32_block, 2, stage, offload, accumulation):
            assert torch.equal(narrow, narrow.bfloat16().float())
            assert not torch.equal(wide, wide.bfloat16().float()), "a gradient of fp32 was rounded to 16 bits"
