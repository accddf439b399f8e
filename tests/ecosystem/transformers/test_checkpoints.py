"""Saving, resuming, evaluation, the best model and the final model of Trainer runs."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.ecosystem.support import forget_runs, needs_transformers, on_cpu_ranks
from tests.ecosystem.transformers import runs
from tests.harness import on_ranks, run_ranks

pytestmark = needs_transformers


def _trainer(folder, place, config, **more):
    forget_runs()
    given = runs.arguments(folder, config, **more)
    return runs.trainer(runs.new_model(place), given)


@pytest.mark.parametrize(
    ("stage", "in_config"),
    [
        (3, True),
        (2, False),
        *[pytest.param(s, c, marks=pytest.mark.slow) for s, c in ((0, True), (1, True), (3, False))],
    ],
)
@on_ranks(2)
@on_cpu_ranks
def test_evaluation_best_model_and_resume(stage, in_config, tmp_path) -> None:
    folder = str(tmp_path)
    place = runs.save_pretrained(folder)
    config = runs.ds_config(stage, optimizer=in_config, scheduler=in_config)
    more = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
    }  # fmt: skip
    out = os.path.join(folder, "out")
    straight = _trainer(out, place, config, **more)
    straight.train()
    losses, evaluations = runs.log(straight)["loss"], runs.log(straight, "eval_loss")["eval_loss"]
    assert len(losses) == runs.STEPS and evaluations == sorted(evaluations, reverse=True) and len(evaluations) == 3

    # "Best" is the highest evaluation loss here, so the first checkpoint is what the engine holds now.
    assert straight.state.best_model_checkpoint.endswith("checkpoint-2")
    assert straight.evaluate()["eval_loss"] == pytest.approx(evaluations[0], rel=1e-6)
    assert straight.predict(runs.rows(12, seed=2)).metrics["test_loss"] == pytest.approx(evaluations[0], rel=1e-6)
    assert os.path.isdir(os.path.join(out, "checkpoint-4", "global_step4"))
    assert os.path.exists(os.path.join(out, "checkpoint-4", "scheduler.pt")) != in_config
    kept = runs.full_weights(straight.deepspeed)

    # The final save is what plain transformers reads.
    straight.save_model(os.path.join(folder, "final"))
    straight.accelerator.wait_for_everyone()
    forget_runs()
    plain = runs.new_model(os.path.join(folder, "final"))
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, kept[name]), name

    resumed = _trainer(out, place, config, **{**more, "load_best_model_at_end": False})
    resumed.train(resume_from_checkpoint=os.path.join(out, "checkpoint-2"))
    assert runs.log(resumed)["loss"] == losses  # the first two come from the checkpoint's own log
    assert runs.log(resumed, "eval_loss")["eval_loss"] == evaluations
    assert resumed.deepspeed.global_steps == runs.STEPS


@on_cpu_ranks
def _trained(stage, folder, resume):
    """What a job that starts anew sees: nothing but the directory."""
    place = runs.save_pretrained(folder)
    out = os.path.join(folder, "out")
    trainer = _trainer(out, place, runs.ds_config(stage), save_strategy="steps", save_steps=3)
    trainer.train(resume_from_checkpoint=resume)
    return runs.log(trainer)["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_resume_with_another_number_of_ranks(stage, tmp_path):
    straight = run_ranks(_trained, 2, stage, str(tmp_path), False)[0]
    os.rename(tmp_path / "out" / "checkpoint-6", tmp_path / "later")
    resumed = run_ranks(_trained, 1, stage, str(tmp_path), True)[0]
    assert resumed[:3] == straight[:3] and len(resumed) == runs.STEPS


@pytest.mark.slow
@on_ranks(2)
@on_cpu_ranks
def test_save_on_each_node(tmp_path) -> None:
    """``save_on_each_node``: both ranks are of one node here, which then has all that it needs."""
    folder = str(tmp_path)
    place = runs.save_pretrained(folder)
    config = runs.ds_config(3, scheduler=True)
    more = {"save_on_each_node": True, "save_strategy": "steps", "save_steps": 3}
    straight = _trainer(os.path.join(folder, "out"), place, config, **more)
    straight.train()
    assert straight.deepspeed.config["checkpoint"]["use_node_local_storage"] is True
    resumed = _trainer(os.path.join(folder, "out"), place, config, **more)
    resumed.train(resume_from_checkpoint=os.path.join(folder, "out", "checkpoint-3"))
    assert runs.log(resumed)["loss"] == runs.log(straight)["loss"]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
@on_ranks(2)
@on_cpu_ranks
def test_save_only_model(stage, tmp_path) -> None:
    folder = str(tmp_path)
    place = runs.save_pretrained(folder)
    out = os.path.join(folder, "out")
    trainer = _trainer(out, place, runs.ds_config(stage), save_strategy="steps", save_steps=3, save_only_model=True)
    trainer.train()
    weights = runs.full_weights(trainer.deepspeed)
    dist.barrier()
    for step in (3, 6):
        names = os.listdir(os.path.join(out, f"checkpoint-{step}"))
        assert "model.safetensors" in names and not any(name.startswith("global_step") for name in names)
    forget_runs()
    plain = runs.new_model(os.path.join(out, "checkpoint-6"))
    assert all(torch.equal(weights[name], parameter) for name, parameter in plain.named_parameters())


@on_ranks(2)
@on_cpu_ranks
def test_final_save_without_consolidation(tmp_path) -> None:
    """Stage 3 without consolidation: the Trainer writes a checkpoint instead, from which the weights come back."""
    folder = str(tmp_path)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    place = runs.save_pretrained(folder)
    config = runs.ds_config(3)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
    trainer = _trainer(os.path.join(folder, "out"), place, config)
    trainer.train()
    final = os.path.join(folder, "final")
    trainer.save_model(final)
    dist.barrier()
    assert not any(name.endswith(".safetensors") for name in os.listdir(final))
    weights = runs.full_weights(trainer.deepspeed)
    found = get_fp32_state_dict_from_zero_checkpoint(final)
    assert all(torch.equal(found[name], value) for name, value in weights.items())


@on_ranks(2)
@on_cpu_ranks
def test_evaluation_without_training(tmp_path) -> None:
    """``evaluate`` and ``predict`` of a run that has trained nothing, at stage 3, with a training configuration."""
    folder = str(tmp_path)
    place = runs.save_pretrained(folder)
    plain = runs.trainer(runs.new_model(place), runs.arguments(folder))
    expected = plain.evaluate()["eval_loss"]
    trainer = _trainer(folder, place, runs.ds_config(3, scheduler=True))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    found = trainer.predict(runs.rows(5, seed=4))
    assert found.predictions.shape[:2] == (5, 9)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    # The same model goes to a Trainer that trains it.
    trainer = runs.trainer(trainer.model, runs.arguments(folder, runs.ds_config(3)))
    trainer.train()
    assert runs.log(trainer)["loss"][-1] < runs.log(trainer)["loss"][0]
    # Below stage 3 transformers itself refuses.
    trainer = _trainer(folder, place, runs.ds_config(2))
    with pytest.raises(ValueError, match="ZeRO inference only makes sense with ZeRO Stage 3"):
        trainer.evaluate()
