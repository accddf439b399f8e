"""Seq2SeqTrainer with ``predict_with_generate`` under ZeRO, and generation of different lengths on the ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.ecosystem.support import forget_runs, needs_transformers, on_cpu_ranks
from tests.ecosystem.transformers import runs
from tests.harness import on_ranks
from tests.zero.construction.pretrained import t5_config

pytestmark = needs_transformers


def _rows(count=32):
    """Copy three tokens."""
    generator = torch.Generator().manual_seed(2)
    made = torch.randint(2, 90, (count, 4), generator=generator)
    return [{"input_ids": row.tolist() + [1], "labels": row[:3].tolist() + [1]} for row in made]


def _collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def _seq2seq(folder, config, place):
    from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments

    forget_runs()
    given = Seq2SeqTrainingArguments(
        folder, deepspeed=config, use_cpu=config is None, max_steps=4, per_device_train_batch_size=2,
        per_device_eval_batch_size=3, learning_rate=0.01, logging_steps=1, report_to="none", disable_tqdm=True,
        save_strategy="no", predict_with_generate=True, generation_max_length=6, dataloader_pin_memory=False,
        max_grad_norm=0.5,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_pretrained(place)
    return Seq2SeqTrainer(
        model, given, train_dataset=_rows(), eval_dataset=_rows(10), data_collator=_collate,
        compute_metrics=lambda found: {"tokens": float(found.predictions.shape[0])},
    )  # fmt: skip


@pytest.mark.parametrize("stages", [[3], pytest.param([0, 1, 2], marks=pytest.mark.slow)])
@on_ranks(2)
@on_cpu_ranks
def test_predict_with_generate(stages, tmp_path) -> None:
    folder = str(tmp_path)
    from transformers import AutoModelForSeq2SeqLM

    place = f"{folder}/pretrained"
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForSeq2SeqLM.from_config(t5_config(eos_token_id=1, pad_token_id=0)).save_pretrained(place)
    dist.barrier()
    expected = _seq2seq(folder, None, place)
    expected.train()
    predicted = expected.predict(_rows(10))
    for stage in stages:
        trainer = _seq2seq(folder, runs.ds_config(stage), place)
        trainer.train()
        runs.assert_same_log(trainer, expected)
        found = trainer.predict(_rows(10))
        assert found.metrics["test_tokens"] == predicted.metrics["test_tokens"]
        assert (found.predictions == predicted.predictions).all()
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=1e-3)
        # Ranks that end at different lengths wait for each other: dummy forwards keep the gathers in step.
        prompt = torch.tensor([[5, 6, 7, 1]]) + 3 * dist.get_rank()
        arguments = {"max_new_tokens": 3 + 4 * dist.get_rank(), "do_sample": False, "min_new_tokens": 2}
        mine = trainer.model.generate(prompt, synced_gpus=stage == 3, **arguments)
        assert torch.equal(mine, expected.model.generate(prompt, **arguments))
        trainer.accelerator.free_memory()
