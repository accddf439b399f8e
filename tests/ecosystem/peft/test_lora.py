"""LoRA on sharded models: trained by the Trainer, saved whole, read again by plain peft; bytes are counted."""

import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.ecosystem.support import forget_runs, needs_transformers, on_cpu_ranks, same_on_all_ranks
from tests.ecosystem.transformers import runs
from tests.harness import on_ranks, run_ranks
from tests.zero.construction.pretrained import tokens

pytestmark = needs_transformers

RANK = 5  # a number that two ranks cannot share evenly


def _lora(**more):
    import peft

    return peft.LoraConfig(
        r=RANK, lora_alpha=10, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more
    )


def _adapted(place, config):
    import peft

    model = runs.new_model(place)
    torch.manual_seed(7)
    model = peft.get_peft_model(model, config)
    model.enable_input_require_grads()
    return model


def _trainer(folder, place, ds_config, adapter, **more):
    forget_runs()
    given = runs.arguments(folder, ds_config, **{"learning_rate": 0.05, **more})
    return runs.trainer(_adapted(place, adapter), given)


def _logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=tokens(3)).logits.detach().clone()


CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
NON_REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


@pytest.mark.parametrize(
    ("stage", "more"),
    [(3, CHECKPOINTED), (2, {}),
     *(pytest.param(*cell, marks=pytest.mark.slow)
       for cell in ((3, {}), (3, NON_REENTRANT), (0, {}), (1, CHECKPOINTED)))],
)  # fmt: skip
@on_ranks(2)
@on_cpu_ranks
def test_train_save_reload_resume(stage, more, tmp_path) -> None:
    folder = str(tmp_path)
    import peft

    place = runs.save_pretrained(folder)
    base = {name: p.detach().clone() for name, p in runs.new_model(place).named_parameters()}
    expected = _trainer(folder, place, None, _lora(modules_to_save=["lm_head"]))
    expected.train()
    config = runs.ds_config(stage)
    out = os.path.join(folder, "out")
    more = {**more, "save_strategy": "steps", "save_steps": 3}
    trainer = _trainer(out, place, config, _lora(modules_to_save=["lm_head"]), **more)
    trainer.train()
    runs.assert_same_log(trainer, expected)
    after = runs.full_weights(trainer.deepspeed)
    for name, value in after.items():
        original = name.replace("base_model.model.", "").replace(".base_layer", "").replace(".original_module", "")
        if original in base:
            assert torch.equal(value, base[original]), f"{name} is frozen"
    assert same_on_all_ranks(after)
    logits = _logits(trainer.deepspeed)

    # The adapter alone, with its full shapes; plain peft on a plain model reads it and computes the same.
    final = os.path.join(folder, "final")
    trainer.save_model(final)
    dist.barrier()
    saved = load_file(os.path.join(final, "adapter_model.safetensors"))
    assert sum("lora_A" in name for name in saved) == sum("lora_B" in name for name in saved) == 6
    for name, value in saved.items():
        shape = {"lora_A": (RANK, 32), "lora_B": (32 if "q_proj" in name else 16, RANK), "lm_head": (97, 32)}
        assert tuple(value.shape) == next(s for key, s in shape.items() if key in name), name
    forget_runs()
    plain = peft.PeftModel.from_pretrained(runs.new_model(place), final)
    torch.testing.assert_close(_logits(plain), logits, rtol=1e-5, atol=1e-5)

    # Checkpoints leave out the frozen weights, and resume.
    straight = runs.log(trainer)["loss"]
    resumed = _trainer(out, place, config, _lora(modules_to_save=["lm_head"]), **more)
    resumed.train(resume_from_checkpoint=os.path.join(out, "checkpoint-3"))
    assert runs.log(resumed)["loss"] == straight


@on_cpu_ranks
def _bytes(stage, accumulation, wider):
    """Bytes of gradients, masters and optimizer state, counted while an adapter on a base of that width is trained."""
    import peft
    from transformers import AutoModelForCausalLM

    import deepspeed
    from deepspeed.zero.storage import StorageKind
    from tests.zero.construction.pretrained import llama_config

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(llama_config(intermediate_size=48 * wider, vocab_size=97 * wider))
    model = peft.get_peft_model(base, _lora())
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    engine = deepspeed.initialize(model=model, config=config)[0]
    memory_tracker = engine._runtime.memory_tracker
    counted = {}
    for _ in range(2 * accumulation):
        batch = tokens(dist.get_rank())
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        for parameter in model.parameters():
            assert parameter.requires_grad or parameter.grad is None
        for kind in (StorageKind.GRADIENT, StorageKind.GRADIENT_BUCKET):
            counted[kind.value] = max(counted.get(kind.value, 0), memory_tracker.peak(kind))
        engine.step()
    engine.memory_report()  # measures the optimizer's own state
    for kind in (StorageKind.OPTIMIZER, StorageKind.MASTER):
        counted[kind.value] = memory_tracker.live(kind)
    held = [
        t for state in engine.basic_optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()
    ]
    counted["tensors of the optimizer"] = sum(t.numel() * t.element_size() for t in held)
    for name, parameter in model.named_parameters():
        state = deepspeed.utils.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert (state is None) == ("lora" not in name), name
    trained = sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in model.parameters() if p.requires_grad)
    return counted, trained


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_frozen_weights_own_no_gradient_and_no_state(stage, accumulation):
    narrow = run_ranks(_bytes, 2, stage, accumulation, 1)
    wide = run_ranks(_bytes, 2, stage, accumulation, 5)
    for (counted, trained), (of_wide, _) in zip(narrow, wide, strict=True):
        assert counted == of_wide, "a wider frozen base costs nothing"
        share = trained if stage == 0 else trained / 2
        # Two moments of four bytes; each of the 12 matrices may be padded to whole 64-element blocks per rank.
        assert 8 * share <= counted["optimizer state"] <= 8 * (share + 12 * 128)
        assert counted["tensors of the optimizer"] == counted["optimizer state"]


@on_ranks(2)
@on_cpu_ranks
def test_accelerate_loop(tmp_path) -> None:
    """The loop of PEFT's documentation: accelerate, stage 3, the adapter taken from the consolidated dict."""
    folder = str(tmp_path)
    import peft
    from accelerate import Accelerator, DeepSpeedPlugin

    place = runs.save_pretrained(folder)
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=True)
    plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    accelerator = Accelerator(deepspeed_plugin=plugin)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
    model = _adapted(place, _lora())
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
    engine, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    batch = torch.stack([row["input_ids"] for row in runs.rows(4)])[accelerator.process_index :: 2]
    for _ in range(4):
        loss = engine(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    logits = _logits(engine)
    state = accelerator.get_state_dict(engine)
    if accelerator.is_main_process:
        accelerator.unwrap_model(engine).save_pretrained(os.path.join(folder, "adapter"), state_dict=state)
    accelerator.wait_for_everyone()
    forget_runs()
    plain = peft.PeftModel.from_pretrained(runs.new_model(place), os.path.join(folder, "adapter"))
    torch.testing.assert_close(_logits(plain), logits, rtol=1e-5, atol=1e-5)
