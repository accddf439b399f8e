"""Generation in the middle of training at stage 3: everything gathered, hooks taken out, and put back."""

import logging

import pytest
import torch
import torch.distributed as dist

from tests.ecosystem.support import forget_runs, needs_transformers, on_cpu_ranks
from tests.ecosystem.transformers import runs as trainer_runs
from tests.ecosystem.trl import runs
from tests.ecosystem.trl.test_trainers import _sft
from tests.harness import on_ranks, run_ranks

pytestmark = needs_transformers


@on_ranks(2)
@on_cpu_ranks
def test_generation_with_gathered_parameters(tmp_path) -> None:
    folder = str(tmp_path)
    from trl.models.utils import unwrap_model_for_generation

    place = trainer_runs.save_pretrained(folder)
    trainer = _sft(folder, place, trainer_runs.ds_config(3))
    trainer.train()
    engine = trainer.model_wrapped
    plain = trainer_runs.new_model_plain(place)
    plain.load_state_dict(trainer_runs.full_weights(engine))
    # Each rank its own prompt and its own length: no rank waits for another inside.
    prompt = torch.tensor([[5, 6, 7, 8]]) + 9 * dist.get_rank()
    wish = {"max_new_tokens": 3 + 5 * dist.get_rank(), "min_new_tokens": 3, "do_sample": False}
    for _ in range(2):
        with unwrap_model_for_generation(engine, trainer.accelerator) as model:
            assert model is trainer.model and all(p.numel() for p in model.parameters())
            assert torch.equal(model.generate(prompt, **wish), plain.generate(prompt, **wish))
        assert all(p.numel() == 0 for p in trainer.model.parameters() if not getattr(p, "ds_persist", False))
    # Training continues as if nothing had been.
    batches = [torch.tensor([[5, 6, 7, 8, 9]]) + 20 * rank for rank in range(dist.get_world_size())]
    engine.train()
    loss = engine(input_ids=batches[dist.get_rank()], labels=batches[dist.get_rank()]).loss
    trainer.accelerator.backward(loss, scale_wrt_gas=False)
    for batch in batches:
        (plain(input_ids=batch, labels=batch).loss / len(batches)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-3)


@on_ranks(2)
@on_cpu_ranks
def test_reference_model_with_dotted_keys(tmp_path) -> None:
    """What ``prepare_deepspeed`` sends, dotted keys included: each is named in one line and changes nothing."""
    folder = str(tmp_path)
    from accelerate import Accelerator, DeepSpeedPlugin
    from trl.models.utils import prepare_deepspeed

    from deepspeed.logging import logger

    place = trainer_runs.save_pretrained(folder)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        for stage in (3, 2):
            forget_runs()
            plugin = DeepSpeedPlugin(zero_stage=stage)
            accelerator = Accelerator(deepspeed_plugin=plugin)
            plugin.deepspeed_config.update(train_micro_batch_size_per_gpu=1, train_batch_size=2)
            plugin.deepspeed_config["gradient_accumulation_steps"] = 1
            plugin.deepspeed_config["gradient_clipping"] = 1.0
            lines.clear()
            engine = prepare_deepspeed(trainer_runs.new_model(place), accelerator)
            assert not engine.training and engine.zero_optimization_stage() == (3 if stage == 3 else 0)
            notices = [line for line in lines if "zero_optimization." in line and "no effect" in line]
            if stage == 3:
                if dist.get_rank() == 0:
                    assert len(notices) == 3, lines
                assert engine.zero_param_persistence_threshold() == 100_000
            forget_runs()
            plain = trainer_runs.new_model_plain(place).eval()
            batch = torch.tensor([[5, 6, 7]])
            with torch.no_grad():
                assert torch.equal(engine(input_ids=batch).logits, plain(input_ids=batch).logits)
            engine.destroy()
    finally:
        logger.removeHandler(handler)


def _length(completions, **_others):
    return [float(len(text.split())) for text in completions]


@on_cpu_ranks
def _policy_gradient(kind, stage, lora, hybrid, folder):
    """GRPO and RLOO: generation and training take turns."""
    import trl
    from datasets import Dataset

    from tests.ecosystem.trl.test_trainers import _lora

    place = trainer_runs.save_pretrained(folder)
    forget_runs()
    config = trainer_runs.ds_config(stage)
    if hybrid:
        config["hybrid_engine"] = {"enabled": True}
    given = runs.arguments(
        getattr(trl, f"{kind}Config"), folder, config, num_generations=2, max_completion_length=5,
        beta=0.1, temperature=1.0,
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": row["prompt"]} for row in runs.pairs(16)])
    trainer = getattr(trl, f"{kind}Trainer")(
        trainer_runs.new_model(place), _length, args=given, train_dataset=prompts, processing_class=runs.tokenizer(),
        peft_config=_lora() if lora else None,
    )  # fmt: skip
    trainer.train()
    logged = trainer_runs.log(trainer, "reward", "loss")
    assert len(logged["reward"]) == len(logged["loss"]) == runs.STEPS
    assert trainer.deepspeed.global_steps == runs.STEPS
    assert type(trainer.deepspeed).__name__ == ("DeepSpeedHybridEngine" if hybrid else "DeepSpeedEngine")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage", "lora", "hybrid"),
    [
        ("GRPO", 3, False, False),
        ("GRPO", 3, True, False),
        ("GRPO", 2, False, False),
        ("GRPO", 0, False, False),
        ("GRPO", 1, True, False),
        ("GRPO", 1, False, True),
        ("GRPO", 3, False, True),
        ("GRPO", 3, True, True),
        ("RLOO", 1, False, False),
        ("RLOO", 3, False, True),
    ],
)
def test_policy_gradient(kind, stage, lora, hybrid, tmp_path):
    pytest.importorskip("trl")
    run_ranks(_policy_gradient, 2, kind, stage, lora, hybrid, str(tmp_path), timeout=180)
