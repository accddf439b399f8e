"""Accelerate's loop at every stage against the same training in plain torch; saving, resuming, taking the model out."""

import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.ecosystem.accelerate import loops
from tests.ecosystem.support import forget_runs, mean_over_ranks, needs_transformers, on_cpu_ranks
from tests.harness import on_ranks

pytestmark = needs_transformers


def _plugin(stage, offload=None, **more):
    from accelerate import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(
        zero_stage=stage, gradient_accumulation_steps=loops.ACCUMULATION, gradient_clipping=loops.CLIP,
        offload_optimizer_device=offload, offload_param_device=offload if stage == 3 else None,
        zero3_save_16bit_model=True, **more,
    )  # fmt: skip
    return loops.shard_everything(plugin)


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": loops.LR, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": loops.LR}),
    "sgd": (torch.optim.SGD, {"lr": loops.LR, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": loops.LR}),
}


CASES = [(stage, None, "adamw") for stage in range(4)] + [(2, "cpu", "adamw"), (3, "cpu", "adamw")]
RARE = [
    (1, None, "sgd"),
    (3, None, "adam"),
    (3, None, "adagrad"),
    (1, "cpu", "adam"),
    (2, "cpu", "adagrad"),
    (3, "cpu", "adagrad"),
]


@pytest.mark.parametrize(("stage", "offload", "name"), CASES + [pytest.param(*c, marks=pytest.mark.slow) for c in RARE])
@on_ranks(2)
@on_cpu_ranks
def test_training_saving_and_resuming(stage, offload, name, tmp_path) -> None:
    folder = str(tmp_path)
    from accelerate import Accelerator

    rank, ranks = dist.get_rank(), dist.get_world_size()
    accelerator = Accelerator(deepspeed_plugin=_plugin(stage, offload))
    assert accelerator.num_processes == ranks and accelerator.distributed_type.value == "DEEPSPEED"
    net = loops.Net()
    kind, arguments = OPTIMIZERS[name]

    def make(parameters):
        return kind(parameters, **arguments)

    # Accelerate advances a torch schedule once per process and update.
    expected_net, expected = loops.plain(
        net, make, rank, ranks, lambda step: loops.LR * loops.halving(step * ranks), epochs=2
    )
    optimizer = make(net.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, loops.halving)
    engine, optimizer, batches, schedule = accelerator.prepare(net, optimizer, loops.loader(), schedule)
    assert engine.zero_optimization_stage() == stage and engine.train_batch_size() == 3 * 2 * ranks
    assert accelerator.unwrap_model(engine) is net
    assert all((p.numel() == 0) == (stage == 3) for p in net.parameters())
    first = loops.accelerated(accelerator, engine, optimizer, batches, schedule)
    accelerator.save_state(os.path.join(folder, "state"), client_state={"epoch": 1})
    second = loops.accelerated(accelerator, engine, optimizer, batches, schedule)
    both = loops.Record(*(getattr(first, n) + getattr(second, n) for n in ("losses", "norms", "rates")))
    loops.assert_same(both, expected)

    found = accelerator.get_state_dict(engine)
    if stage < 3 or rank == 0:
        assert list(found) == list(expected_net.state_dict())
        for key, value in expected_net.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
        assert len({value.untyped_storage().data_ptr() for value in found.values()}) == len(found)
    else:
        assert found is None
    accelerator.save_model(engine, os.path.join(folder, "model"))
    accelerator.wait_for_everyone()
    saved = load_file(os.path.join(folder, "model", "model.safetensors"))
    assert sorted(saved) == sorted(expected_net.state_dict())
    for key, value in expected_net.state_dict().items():
        torch.testing.assert_close(saved[key], value, rtol=1e-4, atol=1e-5)

    # The live engine goes back and does the same again, to the bit.
    assert os.path.isdir(os.path.join(folder, "state", "pytorch_model"))
    assert os.path.isfile(os.path.join(folder, "state", "scheduler.bin"))
    accelerator.load_state(os.path.join(folder, "state"))
    again = loops.accelerated(accelerator, engine, optimizer, batches, schedule)
    assert again == second
    assert engine.global_steps == len(both.norms)
    accelerator.end_training()
    accelerator.free_memory()
    accelerator.free_memory()


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
@on_ranks(2)
@on_cpu_ranks
def test_a_new_process_resumes(stage, tmp_path) -> None:
    """What ``load_state`` finds in a process that has trained nothing."""
    folder = str(tmp_path)
    from accelerate import Accelerator

    from tests.ecosystem.support import forget_runs

    def make():
        accelerator = Accelerator(deepspeed_plugin=_plugin(stage))
        net = loops.Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=loops.LR)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, loops.halving)
        return accelerator, *accelerator.prepare(net, optimizer, loops.loader(), schedule)

    accelerator, *objects = make()
    loops.accelerated(accelerator, *objects)
    accelerator.save_state(folder)
    expected = loops.accelerated(accelerator, *objects)
    accelerator.free_memory()
    forget_runs()
    accelerator, *objects = make()
    accelerator.load_state(folder)
    assert loops.accelerated(accelerator, *objects) == expected


@pytest.mark.parametrize(
    ("stage", "precision"), [(3, "bf16"), (2, "fp16"), *[pytest.param(s, p, marks=pytest.mark.slow) for s, p in
    [(0, "bf16"), (1, "bf16"), (2, "bf16"), (0, "fp16"), (1, "fp16"), (3, "fp16")]]],
)  # fmt: skip
@on_ranks(2)
@on_cpu_ranks
def test_half_precision(stage, precision) -> None:
    from accelerate import Accelerator

    rank, ranks = dist.get_rank(), dist.get_world_size()
    accelerator = Accelerator(deepspeed_plugin=_plugin(stage), mixed_precision=precision)
    assert accelerator.mixed_precision == precision
    net = loops.Net()
    _, expected = loops.plain(net, lambda p: torch.optim.AdamW(p, lr=loops.LR), rank, ranks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=loops.LR)
    engine, optimizer, batches = accelerator.prepare(net, optimizer, loops.loader())
    found = loops.accelerated(accelerator, engine, optimizer, batches)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert all(p.dtype == dtype for p in engine.parameters()) and not accelerator.optimizer_step_was_skipped
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=0.05, atol=0.02)
    state = accelerator.get_state_dict(engine)
    if stage < 3 or rank == 0:
        assert all(value.dtype == dtype for value in state.values())


@on_ranks(2)
@on_cpu_ranks
def test_skipped_updates_are_reported() -> None:
    """Updates that the loss scale skips: the optimizer reports it and no schedule advances."""
    from accelerate import Accelerator, DeepSpeedPlugin

    config = {
        "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 3, "gradient_clipping": "auto",
        "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 26, "hysteresis": 1},
    }  # fmt: skip
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    net = loops.Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=loops.LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, loops.halving)
    engine, optimizer, batches, schedule = accelerator.prepare(net, optimizer, loops.loader(96), schedule)
    rates, skipped = [], []
    for x, y in batches:
        loss = torch.nn.functional.mse_loss(engine(x).float(), y)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        rates.append(optimizer.param_groups[0]["lr"])
    assert skipped[0] and not skipped[-1] and skipped == sorted(skipped, reverse=True)
    advanced = skipped.count(False) * accelerator.num_processes
    assert rates[skipped.count(True) - 1] == loops.LR and rates[-1] == pytest.approx(loops.LR * loops.halving(advanced))
    assert engine.global_steps == len(skipped) and engine.skipped_steps == skipped.count(True)
    assert mean_over_ranks(rates[-1]) == pytest.approx(rates[-1])


@on_ranks(2)
@on_cpu_ranks
def test_optimizer_with_a_mode() -> None:
    """``train`` and ``eval`` of schedule-free optimizers reach the client's own through both wrappers."""
    from accelerate import Accelerator

    class WithMode(torch.optim.SGD):
        mode = "none"

        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    for stage in (0, 2, 3):
        accelerator = Accelerator(deepspeed_plugin=_plugin(stage))
        net = loops.Net()
        own = WithMode(net.parameters(), lr=loops.LR)
        _, optimizer, _ = accelerator.prepare(net, own, loops.loader())
        optimizer.eval()
        assert own.mode == "eval"
        optimizer.train()
        assert own.mode == "train"
        accelerator.free_memory()
        forget_runs()


@on_ranks(2)
@on_cpu_ranks
def test_refused_consolidation() -> None:
    """Stage 3 without ``zero3_save_16bit_model``: accelerate refuses, and names the two ways out."""
    from accelerate import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(deepspeed_plugin=loops.shard_everything(DeepSpeedPlugin(zero_stage=3)))
    net = loops.Net()
    engine, _, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loops.loader())
    assert not engine.zero_gather_16bit_weights_on_model_save()
    with pytest.raises(ValueError, match="stage3_gather_16bit_weights_on_model_save"):
        accelerator.get_state_dict(engine)


@pytest.mark.slow
@on_ranks(2)
@on_cpu_ranks
def test_compiled() -> None:
    """``dynamo_backend``: the engine's model is compiled in place."""
    from accelerate import Accelerator

    accelerator = Accelerator(deepspeed_plugin=_plugin(2), dynamo_backend="eager")
    net = loops.Net()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _, expected = loops.plain(net, lambda p: torch.optim.AdamW(p, lr=loops.LR), rank, ranks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=loops.LR)
    engine, optimizer, batches = accelerator.prepare(net, optimizer, loops.loader())
    assert engine.is_compiled
    loops.assert_same(loops.accelerated(accelerator, engine, optimizer, batches), expected)
