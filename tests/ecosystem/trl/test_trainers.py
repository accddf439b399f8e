"""SFTTrainer and DPOTrainer under ZeRO, against the same trainers without deepspeed."""

import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.ecosystem.support import forget_runs, needs_transformers, on_cpu_ranks
from tests.ecosystem.transformers import runs as trainer_runs
from tests.ecosystem.trl import runs
from tests.harness import run_ranks

pytestmark = needs_transformers


def _lora():
    import peft

    return peft.LoraConfig(
        r=5, lora_alpha=10, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )


def _sft(folder, place, config, lora=False, **more):
    from trl import SFTConfig, SFTTrainer

    forget_runs()
    given = runs.arguments(SFTConfig, folder, config, **more)
    return SFTTrainer(
        trainer_runs.new_model(place), given, train_dataset=runs.texts(), processing_class=runs.tokenizer(),
        peft_config=_lora() if lora else None,
    )  # fmt: skip


@on_cpu_ranks
def _supervised(cases, folder):
    import peft

    place = trainer_runs.save_pretrained(folder)
    expected = {}
    for stage, lora, more in cases:
        if lora not in expected:
            torch.manual_seed(9)
            expected[lora] = _sft(folder, place, None, lora)
            expected[lora].train()
        torch.manual_seed(9)
        trainer = _sft(folder, place, trainer_runs.ds_config(stage), lora, **more)
        trainer.train()
        trainer_runs.assert_same_log(trainer, expected[lora])
        final = os.path.join(folder, f"final-{stage}-{lora}-{len(more)}")
        trainer.save_model(final)
        dist.barrier()
        if not lora:
            continue
        shapes = {tuple(value.shape) for value in load_file(os.path.join(final, "adapter_model.safetensors")).values()}
        assert shapes == {(5, 32), (32, 5), (16, 5)}
        forget_runs()
        plain = peft.PeftModel.from_pretrained(trainer_runs.new_model(place), final).eval()
        batch = torch.tensor([[5, 6, 7, 8, 9]])
        trainer.deepspeed.eval()
        with torch.no_grad():
            torch.testing.assert_close(
                plain(input_ids=batch).logits, trainer.deepspeed(input_ids=batch).logits, rtol=1e-5, atol=1e-5
            )


CHECKPOINTED = {"gradient_checkpointing": True}
SUPERVISED = [(3, False, {}), (3, True, {}), (3, True, CHECKPOINTED), (2, False, {})]


def test_supervised_fine_tuning(tmp_path):
    run_ranks(_supervised, 2, SUPERVISED, str(tmp_path))


@pytest.mark.slow
def test_supervised_fine_tuning_everywhere(tmp_path):
    cases = [(stage, lora, more) for stage in range(4) for lora in (False, True) for more in ({}, CHECKPOINTED)]
    run_ranks(_supervised, 2, cases, str(tmp_path), timeout=300)


def _dpo(folder, place, config, lora=False, **more):
    from trl import DPOConfig, DPOTrainer

    forget_runs()
    given = runs.arguments(DPOConfig, folder, config, **more)
    return DPOTrainer(
        trainer_runs.new_model(place), None if lora else trainer_runs.new_model(place), args=given,
        train_dataset=runs.pairs(), processing_class=runs.tokenizer(), peft_config=_lora() if lora else None,
    )  # fmt: skip


PREFERENCES = ("loss", "grad_norm", "rewards/margins", "logps/chosen", "logps/rejected")


@on_cpu_ranks
def _preferences(cases, folder):
    """A policy that is trained and a reference that only runs, two engines in one process."""
    place = trainer_runs.save_pretrained(folder)
    expected = {}
    for stage, lora, more in cases:
        if lora not in expected:
            torch.manual_seed(9)
            expected[lora] = _dpo(folder, place, None, lora)
            expected[lora].train()
            margins = trainer_runs.log(expected[lora], *PREFERENCES)["rewards/margins"]
            assert margins[0] == 0 and margins[-1] > 0
        torch.manual_seed(9)
        trainer = _dpo(folder, place, trainer_runs.ds_config(stage, **more), lora)
        trainer.train()
        if not lora:
            reference = trainer.ref_model
            assert type(reference).__name__ == "DeepSpeedEngine" and reference is not trainer.deepspeed
            assert reference.zero_optimization_stage() == (3 if stage == 3 else 0)
            weights = dict(trainer_runs.new_model(place).named_parameters()) if stage < 3 else {}
            for name, value in weights.items():
                assert torch.equal(dict(reference.module.named_parameters())[name], value)
        found, wanted = (trainer_runs.log(t, *PREFERENCES) for t in (trainer, expected[lora]))
        for name in PREFERENCES:
            assert len(found[name]) == runs.STEPS
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(wanted[name]), rtol=1e-3, atol=1e-3)


PAIRS = [(3, False, {}), (2, False, {"optimizer": False}), (3, True, {})]


def test_preference_pairs(tmp_path):
    run_ranks(_preferences, 2, PAIRS, str(tmp_path))


@pytest.mark.slow
def test_preference_pairs_everywhere(tmp_path):
    cases = [
        (stage, lora, {"offload": offload, "scheduler": False})
        for stage in range(4)
        for lora in (False, True)
        for offload in ((False, True) if stage > 1 else (False,))
    ]
    run_ranks(_preferences, 2, cases, str(tmp_path), timeout=300)
