"""A configuration file full of "auto"; optimizer and schedule in it or in the code: the four combinations."""

import json
import math
import os

import pytest
import torch
import torch.distributed as dist

from tests.ecosystem.accelerate import loops
from tests.ecosystem.support import forget_runs, needs_transformers, on_cpu_ranks
from tests.harness import on_ranks

pytestmark = needs_transformers

WARM_UP, TOTAL = 3, 16


def _file(folder, stage, optimizer, scheduler, offload):
    zero = {
        "stage": stage, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "auto", "nvme_path": "auto"}, "offload_param": {"device": "auto"},
        "overlap_comm": True, "contiguous_gradients": True,
    }  # fmt: skip
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config = {
        "zero_optimization": zero, "gradient_clipping": "auto", "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "steps_per_print": 2000,
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"}, "wall_clock_breakdown": False,
    }  # fmt: skip
    if optimizer:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
    if scheduler:
        params = dict.fromkeys(["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"], "auto")
        config["scheduler"] = {"type": "WarmupDecayLR", "params": {**params, "warmup_type": "linear"}}
    path = os.path.join(folder, f"{stage}-{optimizer}-{scheduler}-{dist.get_rank()}.json")
    with open(path, "w") as file:
        json.dump(config, file)
    return path


def _warm_up_and_decay(step, ranks):
    """WarmupDecayLR, linear, with ``total_num_steps`` divided by the processes as accelerate does.

    Its first two updates share the first rate: it is written when the schedule is made, and again by its first step.
    """
    total, step = math.ceil(TOTAL / ranks), max(0, step - 1)
    if step < WARM_UP:
        return loops.LR * step / WARM_UP
    return loops.LR * max(0.0, (total - step) / (total - WARM_UP))


@pytest.mark.parametrize(
    ("stage", "offload"), [(3, False), (2, True), *[pytest.param(s, False, marks=pytest.mark.slow) for s in range(3)]]
)
@on_ranks(2)
@on_cpu_ranks
def test_four_combinations_of_dummies(stage, offload, tmp_path) -> None:
    folder = str(tmp_path)
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim, DummyScheduler

    rank, ranks = dist.get_rank(), dist.get_world_size()

    def make(parameters):
        return torch.optim.AdamW(parameters, lr=loops.LR, weight_decay=0.1)

    for optimizer_in_file in (True, False):
        for scheduler_in_file in (True, False):
            forget_runs()
            net = loops.Net()
            path = _file(folder, stage, optimizer_in_file, scheduler_in_file, offload)
            plugin = DeepSpeedPlugin(hf_ds_config=path, gradient_clipping=loops.CLIP)
            accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=loops.ACCUMULATION)
            if optimizer_in_file:
                optimizer = DummyOptim(net.parameters(), lr=loops.LR, weight_decay=0.1)
            else:
                optimizer = make(net.parameters())
            steps_per_update = 1  # schedules of the engine
            if scheduler_in_file:
                schedule = DummyScheduler(optimizer, total_num_steps=TOTAL, warmup_num_steps=WARM_UP)
            elif optimizer_in_file:
                schedule = DummyScheduler(
                    optimizer, lr_scheduler_callable=lambda o: torch.optim.lr_scheduler.LambdaLR(o, loops.halving)
                )
            else:
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, loops.halving)
                steps_per_update = ranks  # accelerate's

            def rate(step, from_file=scheduler_in_file, times=steps_per_update):
                return _warm_up_and_decay(step, ranks) if from_file else loops.LR * loops.halving(step * times)

            expected_net, expected = loops.plain(net, make, rank, ranks, rate, epochs=2)
            engine, optimizer, batches, schedule = accelerator.prepare(net, optimizer, loops.loader(), schedule)
            zero = engine.config["zero_optimization"]
            assert zero["reduce_bucket_size"] == loops.WIDTH**2 and "auto" not in json.dumps(engine.config)
            assert engine.zero_param_persistence_threshold() == loops.WIDTH * 10
            assert engine.gradient_clipping() == loops.CLIP
            assert (schedule.scheduler is engine.lr_scheduler) == (scheduler_in_file or optimizer_in_file)
            found = loops.accelerated(accelerator, engine, optimizer, batches, schedule)
            more = loops.accelerated(accelerator, engine, optimizer, batches, schedule)
            both = loops.Record(*(getattr(found, n) + getattr(more, n) for n in ("losses", "norms", "rates")))
            loops.assert_same(both, expected)
            masters = dict(engine.iter_full("fp32"))
            for name, value in expected_net.state_dict().items():
                torch.testing.assert_close(masters[name], value, rtol=1e-4, atol=1e-5)
            accelerator.free_memory()


@on_ranks(2)
@on_cpu_ranks
def test_a_schedule_of_this_package() -> None:
    """A schedule object of this package: accelerate knows it by its class name and leaves its steps to the engine."""
    from accelerate import Accelerator, DeepSpeedPlugin

    from deepspeed.runtime.lr_schedules import WarmupLR

    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = loops.Net()
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=loops.CLIP, gradient_accumulation_steps=loops.ACCUMULATION)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    optimizer = torch.optim.AdamW(net.parameters(), lr=loops.LR)
    schedule = WarmupLR(optimizer, warmup_max_lr=loops.LR, warmup_num_steps=4, warmup_type="linear")
    _, expected = loops.plain(
        net,
        lambda p: torch.optim.AdamW(p, lr=loops.LR),
        rank,
        ranks,
        lambda step: loops.LR * min(1.0, max(0, step - 1) / 4),
        2,
    )
    engine, optimizer, batches, schedule = accelerator.prepare(net, optimizer, loops.loader(), schedule)
    assert schedule.scheduler is engine.lr_scheduler
    parts = [loops.accelerated(accelerator, engine, optimizer, batches, schedule) for _ in range(2)]
    both = (sum((getattr(part, name) for part in parts), []) for name in ("losses", "norms", "rates"))
    loops.assert_same(loops.Record(*both), expected)
