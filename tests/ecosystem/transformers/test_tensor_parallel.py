"""The Trainer with layers that ranks share: its log is that of plain data parallelism, and it saves whole models."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.ecosystem.support import forget_runs, needs_transformers, on_cpu_ranks
from tests.ecosystem.transformers import runs
from tests.harness import run_ranks

pytestmark = needs_transformers


def _trained(folder, place, config, **more):
    forget_runs()
    finished = runs.trainer(runs.new_model(place), runs.arguments(folder, config, **more))
    finished.train()
    return finished


@on_cpu_ranks
def _alone(folder):
    """One rank without deepspeed: two ranks that share every layer see the same batches as it does."""
    place = runs.save_pretrained(folder)
    finished = _trained(folder, place, None)
    return runs.log(finished), {name: p.detach().clone() for name, p in finished.model.named_parameters()}


@on_cpu_ranks
def _shared(stages, folder, expected, weights, by_sizes=False):
    """By the key of the configuration, or by Accelerate's ``ParallelismConfig`` in the arguments of the Trainer."""
    place, out = os.path.join(folder, "pretrained"), os.path.join(folder, "out")
    for stage in stages:
        config = runs.ds_config(stage, optimizer=stage != 1)
        more = {"save_strategy": "steps", "save_steps": 3} if stage in (1, 3) else {}
        if by_sizes:
            from accelerate.utils import ParallelismConfig

            more["parallelism_config"] = ParallelismConfig(tp_size=2)
        else:
            config["tensor_parallel"] = {"autotp_size": 2}
        finished = _trained(out, place, config, **more)
        engine = finished.deepspeed
        assert (engine.dp_world_size, engine.mp_world_size, engine.train_batch_size()) == (1, 2, 2 * 2)
        assert engine.global_steps == runs.STEPS and finished.state.max_steps == runs.STEPS
        for name, values in expected.items():
            assert runs.log(finished)[name] == pytest.approx(values, rel=2e-4, abs=2e-4), (stage, name)
        kept = runs.full_weights(engine)
        for name, value in weights.items():
            torch.testing.assert_close(kept[name], value, rtol=1e-2, atol=2e-4, msg=lambda t, n=name: f"{n}: {t}")
        assert finished.evaluate()["eval_loss"] < expected["loss"][0]
        # What is saved is what plain transformers reads.
        final = os.path.join(folder, f"final{stage}")
        finished.save_model(final)
        finished.accelerator.wait_for_everyone()
        plain = runs.new_model_plain(final)
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter.detach(), kept[name]), name
        if "save_steps" in more:
            forget_runs()
            again = runs.trainer(runs.new_model(place), runs.arguments(out, config, **more))
            again.train(resume_from_checkpoint=os.path.join(out, "checkpoint-3"))
            assert runs.log(again)["loss"] == pytest.approx(expected["loss"], rel=2e-4)


def _check(stages, folder, *, by_sizes=False):
    expected, weights = run_ranks(_alone, 1, folder)[0]
    run_ranks(_shared, 2, stages, folder, expected, weights, by_sizes, timeout=240)


def test_the_trainer_cuts_a_model_by_a_parallelism_config(tmp_path):
    _check((3,), str(tmp_path), by_sizes=True)


def test_the_trainer_cuts_a_model(tmp_path):
    _check((1, 3), str(tmp_path))


@pytest.mark.slow
def test_the_trainer_cuts_a_model_at_other_stages(tmp_path):
    _check((0, 2), str(tmp_path))


@on_cpu_ranks
def _two_by_two(folder, expected):
    place = runs.save_pretrained(folder)
    config = runs.ds_config(2) | {"tensor_parallel": {"autotp_size": 2}}
    finished = _trained(os.path.join(folder, "out"), place, config)
    assert (finished.deepspeed.dp_world_size, finished.deepspeed.train_batch_size()) == (2, 2 * 2 * 2)
    for name, values in expected.items():
        assert runs.log(finished)[name] == pytest.approx(values, rel=2e-4, abs=2e-4), name
    assert dist.get_world_size() == 4


@on_cpu_ranks
def _pair(folder):
    return runs.log(_trained(folder, runs.save_pretrained(folder), None))


@pytest.mark.slow
def test_two_ranks_share_layers_and_two_the_batch(tmp_path):
    expected = run_ranks(_pair, 2, str(tmp_path))[0]
    run_ranks(_two_by_two, 4, str(tmp_path), expected, timeout=240)
