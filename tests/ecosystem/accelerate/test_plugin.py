"""Every argument of DeepSpeedPlugin reaches the engine."""

import base64
import copy
import json
import os

import pytest
import torch
import torch.distributed as dist

from tests.ecosystem.accelerate import loops
from tests.ecosystem.support import forget_runs, mean_over_ranks, needs_transformers, on_cpu_ranks
from tests.harness import on_ranks, run_ranks

pytestmark = needs_transformers


def _prepared(plugin, *loaders, net=None, **more):
    """A fresh Accelerator with the plugin, and the engine of a model with an optimizer."""
    from accelerate import Accelerator

    forget_runs()
    accelerator = Accelerator(deepspeed_plugin=loops.shard_everything(plugin), **more)
    net = loops.Net() if net is None else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=loops.LR)
    engine, optimizer, *rest = accelerator.prepare(net, optimizer, *(loaders or (loops.loader(),)))
    return accelerator, engine, optimizer, rest[0]


def _trains(accelerator, engine, optimizer, batches):
    """Trains, and prints which model states have bytes where."""
    first, second = (loops.accelerated(accelerator, engine, optimizer, batches) for _ in range(2))
    assert sum(second.losses) < sum(first.losses)
    kinds = {kind for kind, counted, *_ in engine.memory_report() if counted}
    accelerator.free_memory()
    return kinds


@on_ranks(2)
@on_cpu_ranks
def test_stage_clipping_accumulation_and_offload(tmp_path) -> None:
    folder = str(tmp_path)
    from accelerate import DeepSpeedPlugin

    # Nothing given: stage 2, clipping at 1.0, everything else off.
    accelerator, engine, *_ = _prepared(DeepSpeedPlugin())
    assert engine.zero_optimization_stage() == 2 and engine.gradient_clipping() == 1.0
    assert engine.gradient_accumulation_steps() == 1 and not engine.zero_cpu_offload()
    assert not engine.zero_gather_16bit_weights_on_model_save() and engine.steps_per_print() is None
    accelerator.free_memory()

    for stage in range(4):
        plugin = DeepSpeedPlugin(
            zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=0.5, zero3_save_16bit_model=stage == 3
        )
        accelerator, engine, optimizer, batches = _prepared(plugin)
        assert engine.zero_optimization_stage() == stage and engine.gradient_clipping() == 0.5
        assert engine.gradient_accumulation_steps() == accelerator.gradient_accumulation_steps == 2
        assert engine.zero_gather_16bit_weights_on_model_save() == (stage == 3)
        assert engine.config["zero_optimization"]["stage"] == stage
        _trains(accelerator, engine, optimizer, batches)

    # The Accelerator's own accumulation fills a plugin that leaves it open.
    accelerator, engine, *_ = _prepared(DeepSpeedPlugin(), gradient_accumulation_steps=4)
    assert engine.gradient_accumulation_steps() == 4 and engine.train_batch_size() == loops.MICRO * 4 * 2
    accelerator.free_memory()

    # Two loaders: the smaller batch counts, or the larger.
    for smallest, size in ((True, 2), (False, 4)):
        plugin = DeepSpeedPlugin(is_train_batch_min=smallest)
        accelerator, engine, *_ = _prepared(plugin, loops.loader(batch_size=2), loops.loader(batch_size=4))
        assert engine.train_micro_batch_size_per_gpu() == size
        accelerator.free_memory()

    # Offload, each device in each place where it may stand.
    nvme = {"offload_optimizer_nvme_path": folder, "offload_param_nvme_path": folder}
    for stage, optimizer_at, param_at in ((1, "cpu", None), (2, "cpu", None), (3, "cpu", "cpu"), (3, "nvme", "nvme")):
        plugin = DeepSpeedPlugin(
            zero_stage=stage, offload_optimizer_device=optimizer_at, offload_param_device=param_at,
            **(nvme if param_at == "nvme" else {}),
        )  # fmt: skip
        accelerator, engine, optimizer, batches = _prepared(plugin)
        assert engine.zero_cpu_offload() and type(engine.basic_optimizer).__name__ == "DeepSpeedCPUAdam"
        kinds = _trains(accelerator, engine, optimizer, batches)
        where = {"cpu": "host", "nvme": "file"}
        assert f"optimizer state ({where[optimizer_at]})" in kinds
        # Parameters that go to files may stay in host memory up to max_in_cpu, which the plugin cannot set.
        tiers = {"cpu": ("host",), "nvme": ("host", "file"), None: ("",)}[param_at]
        assert param_at is None or any(f"compute parameters ({tier})" in kinds for tier in tiers)

    # The client's own optimizer under offload, which accelerate would replace.
    config = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False, "train_micro_batch_size_per_gpu": "auto",
    }  # fmt: skip
    accelerator, engine, optimizer, batches = _prepared(DeepSpeedPlugin(hf_ds_config=config))
    assert type(engine.basic_optimizer) is torch.optim.AdamW and engine.zero_cpu_offload()
    assert "optimizer state (host)" in _trains(accelerator, engine, optimizer, batches)


@on_ranks(2)
@on_cpu_ranks
def test_config_as_dict_file_text_and_environment(tmp_path) -> None:
    folder = str(tmp_path)
    from accelerate import DeepSpeedPlugin

    config = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e5}, "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "steps_per_print": 7,
    }  # fmt: skip
    path = os.path.join(folder, f"config-{os.environ['RANK']}.json")
    with open(path, "w") as file:
        json.dump(config, file)
    text = json.dumps(config)
    for source in (config, path, text, base64.urlsafe_b64encode(text.encode()).decode()):
        accelerator, engine, optimizer, batches = _prepared(DeepSpeedPlugin(hf_ds_config=source))
        assert engine.zero_optimization_stage() == 1 and engine.zero_reduce_bucket_size() == 500_000
        assert engine.train_batch_size() == loops.MICRO * 2 * 2 and engine.steps_per_print() is None
        assert config["train_batch_size"] == "auto"  # the caller's dict is not touched
        accelerator.free_memory()

    # What `accelerate launch` leaves in the environment.
    forget_runs()
    os.environ.update(
        ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE="3",
        ACCELERATE_GRADIENT_ACCUMULATION_STEPS="2", ACCELERATE_GRADIENT_CLIPPING="0.5",
        ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="cpu", ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE="cpu",
        ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL="true", ACCELERATE_MIXED_PRECISION="bf16",
    )  # fmt: skip
    from accelerate import Accelerator

    accelerator = Accelerator()
    net = loops.Net()
    engine, *_ = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loops.loader())
    assert engine.zero_optimization_stage() == 3 and engine.gradient_clipping() == 0.5
    assert engine.gradient_accumulation_steps() == 2 and engine.zero_cpu_offload() and engine.bfloat16_enabled()
    assert engine.zero_gather_16bit_weights_on_model_save()


@pytest.mark.parametrize("flag", [True, pytest.param(False, marks=pytest.mark.slow)])
@on_ranks(2)
@on_cpu_ranks
def test_construction_under_zero_init(flag) -> None:
    """``zero3_init_flag``: this accelerate hands it to nobody; transformers shards while it builds in any case."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from transformers import AutoModelForCausalLM

    from tests.zero.construction.pretrained import llama_config, tokens

    plugin = loops.shard_everything(DeepSpeedPlugin(zero_stage=3, zero3_init_flag=flag))
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = AutoModelForCausalLM.from_config(llama_config())
    assert all(p.shape == (0,) and hasattr(p, "ds_id") for p in model.parameters())
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
    engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    batch = tokens(accelerator.process_index)
    losses = []
    for _ in range(5):
        loss = engine(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        losses.append(mean_over_ranks(loss))
    assert losses[-1] < losses[0]


def _switch_config():
    from transformers import SwitchTransformersConfig

    return SwitchTransformersConfig(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=6,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, router_jitter_noise=0.0, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip


def _trains_with_leaf_modules(names, family, model_config, by_environment=False):
    """Compares five updates with plain torch; returns the experts that ran, which are modules in some models only."""
    from accelerate import Accelerator, DeepSpeedPlugin

    from deepspeed.utils import get_z3_leaf_modules, z3_leaf_parameter
    from tests.zero.construction.pretrained import tokens

    forget_runs()
    torch.manual_seed(3)
    reference = family.from_config(model_config)
    net = copy.deepcopy(reference)
    if by_environment:
        os.environ["ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"] = names
    plugin = DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names=None if by_environment else names)
    loops.shard_everything(plugin).deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    accelerator = Accelerator(deepspeed_plugin=plugin)
    engine, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.2))
    marked = get_z3_leaf_modules(net)
    assert marked == [module for module in net.modules() if type(module).__name__ in names.split(",")] != []
    assert all(z3_leaf_parameter(parameter) for module in marked for parameter in module.parameters())
    assert not z3_leaf_parameter(net.lm_head.weight)

    ran = set()
    for name, module in net.named_modules():
        if ".experts.expert_" in name:
            module.register_forward_hook(lambda *_, name=name: ran.add(name))
    plain = torch.optim.SGD(reference.parameters(), lr=0.2)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for _ in range(5):
        batch = tokens(rank, batch=1, length=3)
        loss = engine(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        for number in range(ranks):
            theirs = tokens(number, batch=1, length=3)
            expected = reference(input_ids=theirs, labels=theirs).loss
            (expected / ranks).backward()
            if number == rank:
                torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    accelerator.free_memory()
    return ran


@on_cpu_ranks
def _mixtures():
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from tests.zero.construction.pretrained import mixtral_config

    _trains_with_leaf_modules("MixtralSparseMoeBlock", AutoModelForCausalLM, mixtral_config(), by_environment=True)
    several = "SwitchTransformersSparseMLP,SwitchTransformersLayerSelfAttention"
    return _trains_with_leaf_modules(several, AutoModelForSeq2SeqLM, _switch_config())


def test_mixtures_are_gathered_whole():
    """``transformer_moe_cls_names``: ranks train together whichever experts their tokens choose."""
    first, second = run_ranks(_mixtures, 2)
    assert first != second, "each rank ran experts of its own"


def test_ms_amp_is_refused_by_name():
    """``enable_msamp`` and ``msamp_opt_level`` write a section that this package names when it refuses it."""
    from accelerate import DeepSpeedPlugin

    from deepspeed.config import parse
    from deepspeed.errors import DeepSpeedConfigError

    plugin = DeepSpeedPlugin(enable_msamp=True, msamp_opt_level="O2")
    config = {**plugin.deepspeed_config, "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    assert config["msamp"] == {"enabled": True, "opt_level": "O2"}
    config["gradient_accumulation_steps"] = 1
    with pytest.raises(DeepSpeedConfigError, match="msamp.*MS-AMP"):
        parse(config, dp_world_size=2)
