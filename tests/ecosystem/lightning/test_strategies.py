"""Lightning's strategies by name and by argument: they train as Lightning does without deepspeed."""

import importlib.util
import json

import pytest
import torch
import torch.distributed as dist

from tests.ecosystem.lightning.devices import has_gpus, run_on_devices
from tests.harness import assert_states_equal

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")

NAMES = [
    "deepspeed",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
    "deepspeed_stage_3_offload_nvme",
]


def _named_strategies(folder):
    from lightning.pytorch.strategies import StrategyRegistry

    from tests.ecosystem.lightning.support import Lit, full, loader, plain, run, trainer

    with run(folder):
        # The registered name has a fixed folder at the root of the file system.
        StrategyRegistry["deepspeed_stage_3_offload_nvme"]["init_params"]["nvme_path"] = str(folder)
        reference = Lit(schedule=True)
        plain(gradient_clip_val=0.5, accumulate_grad_batches=2).fit(reference, loader(), loader())
        expected = {name: value.detach().clone() for name, value in reference.named_parameters()}
        (tested,) = plain().test(reference, loader(), verbose=False)
        for name in NAMES:
            model = Lit(schedule=True)
            runner = trainer(name, gradient_clip_val=0.5, accumulate_grad_batches=2)
            runner.fit(model, loader(), loader())
            assert runner.global_step == 6 // dist.get_world_size(), name
            engine = runner.strategy.deepspeed_engine
            assert engine.global_steps == runner.global_step and engine.lr_scheduler is None, name
            assert model.losses == pytest.approx(reference.losses, rel=1e-4), name
            assert_states_equal(full(model), expected, rtol=2e-4, atol=2e-5)
            (found,) = trainer(name).test(model, loader(), verbose=False)
            assert found == pytest.approx(tested, rel=1e-3), name
            trainer(name).validate(model, loader(), verbose=False)
            predicted = trainer(name).predict(model, loader())
            assert len(predicted) == 12 // dist.get_world_size() and predicted[0].shape == (2, 1), name


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_named_strategies_train_like_lightning_alone(ranks, tmp_path):
    run_on_devices(_named_strategies, ranks, tmp_path, timeout=150)


# Every argument of DeepSpeedStrategy that goes into the configuration, away from its default.
ARGUMENTS = {
    "remote_device": "cpu",
    "offload_optimizer": True,
    "offload_parameters": True,
    "params_buffer_count": 6,
    "params_buffer_size": 200_000,
    "max_in_cpu": 2_000_000,
    "optimizer_buffer_count": 5,
    "block_size": 524_288,
    "queue_depth": 4,
    "single_submit": True,
    "overlap_events": False,
    "thread_count": 2,
    "pin_memory": True,
    "sub_group_size": 1_000_000,
    "contiguous_gradients": False,
    "overlap_comm": False,
    "allgather_partitions": False,
    "reduce_scatter": False,
    "allgather_bucket_size": 1_000_000,
    "reduce_bucket_size": 2_000_000,
    "zero_allow_untested_optimizer": True,
    "logging_batch_size_per_gpu": 2,
    "logging_level": 30,
    "partition_activations": False,
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": False,
    "synchronize_checkpoint_boundary": False,
    "exclude_frozen_parameters": True,
}


def _all_arguments(folder):
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from tests.ecosystem.lightning.support import Lit, loader, run, trainer

    backend = "nccl" if has_gpus(dist.get_world_size()) else "gloo"
    with run(folder):
        for stage in (0, 1, 2, 3):
            arguments = dict(ARGUMENTS, nvme_path=str(folder), process_group_backend=backend)
            if stage < 3:
                arguments["offload_parameters"] = False
            if stage == 0:
                arguments["offload_optimizer"] = False
            model = Lit()
            runner = trainer(DeepSpeedStrategy(stage=stage, **arguments))
            runner.fit(model, loader())
            engine = runner.strategy.deepspeed_engine
            assert engine.zero_optimization_stage() == stage and engine.train_micro_batch_size_per_gpu() == 2
            zero = engine.config["zero_optimization"]
            assert zero["reduce_bucket_size"] == 2_000_000 and zero["overlap_comm"] is False
            assert model.losses[-1] < model.losses[0]
        without = trainer(DeepSpeedStrategy(zero_optimization=False))
        without.fit(Lit(), loader())
        assert without.strategy.deepspeed_engine.zero_optimization_stage() == 0


def _precisions(folder):
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from tests.ecosystem.lightning.support import Lit, loader, run, trainer

    dtypes = {
        "16-mixed": torch.float16,
        "16-true": torch.float16,
        "bf16-mixed": torch.bfloat16,
        "32-true": torch.float32,
    }
    dtypes["bf16-true"] = torch.bfloat16
    with run(folder):
        for precision, dtype in dtypes.items():
            for stage in (2, 3):
                model = Lit()
                scale = {"initial_scale_power": 8, "loss_scale_window": 4, "hysteresis": 1, "min_loss_scale": 2}
                runner = trainer(DeepSpeedStrategy(stage=stage, **scale), precision=precision)
                runner.fit(model, loader(), loader())
                engine = runner.strategy.deepspeed_engine
                assert {parameter.dtype for parameter in model.parameters()} == {dtype}, precision
                if dtype is torch.float16:
                    # Twelve batches over the ranks, doubled every four good steps.
                    assert engine.optimizer.loss_scale == 2 ** (8 + 12 // dist.get_world_size() // 4)
                assert model.losses[-1] < model.losses[0], precision


def _config_in_three_ways(folder):
    import os

    from lightning.pytorch.strategies import DeepSpeedStrategy

    from tests.ecosystem.lightning.support import Lit, loader, run, trainer

    class Bare(Lit):
        def configure_optimizers(self):
            raise AssertionError("the configuration has an optimizer")

    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0003}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}},
        "zero_optimization": {"stage": 1},
    }
    path = folder / f"config-{dist.get_rank()}.json"
    path.write_text(json.dumps(config))
    with run(folder):
        losses = []
        for way in (config, str(path), None):
            if way is None:
                os.environ["PL_DEEPSPEED_CONFIG_PATH"] = str(path)
            model = Bare()
            runner = trainer(DeepSpeedStrategy(config=way))
            runner.fit(model, loader())
            assert runner.strategy.deepspeed_engine.zero_optimization_stage() == 1
            (schedule,) = runner.lr_scheduler_configs
            assert type(schedule.scheduler).__name__ == "WarmupLR" and schedule.interval == "step"
            assert schedule.scheduler.last_batch_iteration == runner.global_step - 1
            losses.append(model.losses)
        assert losses[0] == losses[1] == losses[2]


def test_arguments_of_the_strategy(tmp_path):
    run_on_devices(_all_arguments, 2, tmp_path, timeout=100)


def test_config_as_dict_file_and_variable(tmp_path):
    run_on_devices(_config_in_three_ways, 2, tmp_path, timeout=60)


def test_precisions(tmp_path):
    run_on_devices(_precisions, 2, tmp_path, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("body", [_all_arguments, _config_in_three_ways, _precisions])
def test_the_same_on_one_rank(body, tmp_path):
    run_on_devices(body, 1, tmp_path, timeout=100)
