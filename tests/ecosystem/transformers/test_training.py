"""The Trainer at every stage against the Trainer without deepspeed, on the same two ranks and the same data."""

import json
import math
import os

import pytest
import torch
import torch.distributed as dist

from tests.ecosystem.support import forget_runs, needs_transformers, on_cpu_ranks
from tests.ecosystem.transformers import runs
from tests.harness import on_ranks, run_ranks

pytestmark = needs_transformers


def _reference(folder, place, **more):
    """The run without deepspeed: torch's data parallelism over gloo."""
    finished = runs.trainer(runs.new_model(place), runs.arguments(folder, **more))
    finished.train()
    weights = {name: p.detach().clone() for name, p in finished.model.named_parameters()}
    forget_runs()
    return finished, weights


def _run(folder, place, config, **more):
    forget_runs()
    given = runs.arguments(folder, config, **more)
    finished = runs.trainer(runs.new_model(place), given)
    finished.train()
    assert finished.deepspeed is finished.model_wrapped
    return finished


def _assert_same_weights(finished, expected):
    found = runs.full_weights(finished.deepspeed)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=2e-4, msg=lambda text, n=name: f"{n}: {text}")


@on_cpu_ranks
def _stages(cases, folder):
    place = runs.save_pretrained(folder)
    expected, weights = _reference(folder, place)
    assert runs.log(expected)["loss"][-1] < runs.log(expected)["loss"][0]
    for stage, optimizer, offload, more in cases:
        config = runs.ds_config(stage, optimizer=optimizer, offload=offload)
        finished = _run(folder, place, config, **more)
        engine = finished.deepspeed
        assert engine.zero_optimization_stage() == stage and engine.train_batch_size() == 2 * 2 * dist.get_world_size()
        assert engine.gradient_clipping() == 0.5 and engine.global_steps == runs.STEPS
        assert config["train_batch_size"] == "auto"
        runs.assert_same_log(finished, expected)
        _assert_same_weights(finished, weights)
        finished.accelerator.free_memory()


# (stage, optimizer in the configuration, offload, further arguments). One in the configuration decays every weight, the
# Trainer's own spares biases and norms; so nothing decays where they are compared.
STAGES = [(stage, stage != 1, False, {}) for stage in range(4)]
OFFLOAD = [(2, False, True, {}), (3, True, True, {}), (3, False, True, {})]
CHECKPOINTED = [
    (
        stage,
        True,
        False,
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}},
    )
    for stage, reentrant in ((3, True), (3, False), (2, True))
]


def test_stages(tmp_path):
    run_ranks(_stages, 2, STAGES, str(tmp_path))


@pytest.mark.slow
def test_offload(tmp_path):
    run_ranks(_stages, 2, OFFLOAD, str(tmp_path))


@pytest.mark.slow
def test_gradient_checkpointing(tmp_path):
    run_ranks(_stages, 2, CHECKPOINTED, str(tmp_path))


@pytest.mark.slow
def test_stages_at_one_rank(tmp_path):
    run_ranks(_stages, 1, STAGES + OFFLOAD + CHECKPOINTED, str(tmp_path), timeout=240)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
@on_ranks(2)
@on_cpu_ranks
def test_config_file_with_a_schedule(stage, tmp_path) -> None:
    """A file; the schedule in it; values that contradict the arguments."""
    folder = str(tmp_path)
    place = runs.save_pretrained(folder)
    path = os.path.join(folder, f"config-{dist.get_rank()}.json")
    with open(path, "w") as file:
        json.dump(runs.ds_config(stage, scheduler=True), file)
    more = {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_epsilon": 1e-6}
    finished = _run(folder, place, path, **more)
    group = finished.deepspeed.basic_optimizer.param_groups[0]
    assert (group["weight_decay"], tuple(group["betas"]), group["eps"]) == (0.1, (0.8, 0.999), 1e-6)
    assert type(finished.deepspeed.lr_scheduler).__name__ == "WarmupDecayLR"
    # Two steps up, then down towards zero.
    expected = [0.01 * min(step / 2, (runs.STEPS - step) / (runs.STEPS - 2)) for step in range(runs.STEPS)]
    assert runs.log(finished, "learning_rate")["learning_rate"] == pytest.approx(expected)
    assert runs.log(finished)["loss"][-1] < runs.log(finished)["loss"][0]
    forget_runs()
    wrong = runs.ds_config(stage)
    wrong["gradient_clipping"] = 3.0
    with pytest.raises(ValueError, match="ds gradient_clipping=3.0 vs hf max_grad_norm=0.5"):
        _run(folder, place, wrong)


ALL_HALF = [(stage, precision) for stage in range(4) for precision in ("bf16", "fp16")]


@pytest.mark.parametrize("cases", [[(3, "bf16"), (2, "fp16")], pytest.param(ALL_HALF, marks=pytest.mark.slow)])
@on_ranks(2, timeout=240)
@on_cpu_ranks
def test_half_precision(tmp_path, cases) -> None:
    folder = str(tmp_path)
    place = runs.save_pretrained(folder)
    expected, _ = _reference(folder, place)
    for stage, precision in cases:
        finished = _run(folder, place, runs.ds_config(stage), **{precision: True})
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        assert all(p.dtype == dtype for p in finished.deepspeed.parameters())
        logged = runs.log(finished)
        skipped = finished.deepspeed.skipped_steps
        assert len(logged["loss"]) == runs.STEPS and all(math.isfinite(loss) for loss in logged["loss"])
        assert logged["loss"][0] == pytest.approx(runs.log(expected)["loss"][0], rel=0.02)
        if not skipped:
            assert logged["loss"] == pytest.approx(runs.log(expected)["loss"], rel=0.05)
        finished.accelerator.free_memory()


@pytest.mark.parametrize(("first", "second"), [(3, 3), pytest.param(2, 2, marks=pytest.mark.slow)])
@on_ranks(2)
@on_cpu_ranks
def test_training_twice(first, second, tmp_path) -> None:
    """A second Trainer, with a new engine, on the model that the first one has trained."""
    folder = str(tmp_path)
    place = runs.save_pretrained(folder)
    trainer = runs.trainer(runs.new_model(place), runs.arguments(folder, runs.ds_config(first)))
    trainer.train()
    engine, kept = trainer.deepspeed, runs.full_weights(trainer.deepspeed)
    again = runs.trainer(trainer.model, runs.arguments(folder, runs.ds_config(second)))
    again.train()
    assert again.deepspeed is not engine and again.deepspeed.module is engine.module
    losses = [runs.log(each)["loss"] for each in (trainer, again)]
    assert losses[1][0] < losses[0][0] and losses[1][-1] < losses[0][-1]
    assert any(not torch.equal(value, kept[name]) for name, value in runs.full_weights(again.deepspeed).items())


@on_ranks(2)
@on_cpu_ranks
def test_smaller_batches_after_running_out_of_memory(tmp_path) -> None:
    """``auto_find_batch_size``: after running out of memory the engine is built again with half the batch."""
    folder = str(tmp_path)
    from transformers import TrainerCallback

    class OutOfMemory(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if trainer._train_batch_size > 2:
                raise RuntimeError("CUDA out of memory.")

    place = runs.save_pretrained(folder)
    more = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    trainer = runs.trainer(runs.new_model(place), runs.arguments(folder, runs.ds_config(2), **more))
    trainer.add_callback(OutOfMemory())
    trainer.train()
    assert trainer._train_batch_size == 2 and trainer.deepspeed.global_steps == runs.STEPS


@on_ranks(2)
@on_cpu_ranks
def test_the_mean_over_all_tokens_of_an_update(tmp_path) -> None:
    """One update of four samples with 1, 3, 5 and 7 labels, over ranks and accumulation; beside plain torch."""
    folder = str(tmp_path)
    from transformers import Trainer

    place = runs.save_pretrained(folder)
    samples = runs.rows(4)
    for number, row in enumerate(samples):
        row["labels"] = row["input_ids"].masked_fill(torch.arange(9) > 1 + 2 * number, -100)
    tokens, labels = (torch.stack([row[key] for row in samples]) for key in ("input_ids", "labels"))
    expected = runs.new_model_plain(place)
    logits = expected(input_ids=tokens, use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
    torch.optim.SGD(expected.parameters(), lr=0.5).step()
    config = runs.ds_config(2, optimizer=False)
    more = {"max_steps": 1, "per_device_train_batch_size": 1, "max_grad_norm": 0.0, "optim": "sgd"}
    given = runs.arguments(folder, config, learning_rate=0.5, lr_scheduler_type="constant", warmup_steps=0, **more)
    finished = Trainer(runs.new_model(place), given, train_dataset=samples)
    finished.train()
    assert finished.deepspeed.gradient_accumulation_steps() == 2
    found = runs.full_weights(finished.deepspeed)
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-4, atol=1e-6, msg=name)
