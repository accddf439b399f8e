"""Several models in one process by a dictionary of plugins, and models that are only run."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.ecosystem.accelerate import loops
from tests.ecosystem.support import needs_transformers, on_cpu_ranks
from tests.harness import on_ranks

pytestmark = needs_transformers


@on_ranks(2)
@on_cpu_ranks
def test_student_and_teacher() -> None:
    """A trained model at stage 2 and one at stage 3 that only runs, each under its own plugin."""
    from accelerate import Accelerator, DeepSpeedPlugin

    student_plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=loops.CLIP)
    teacher_plugin = DeepSpeedPlugin(
        hf_ds_config={"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": loops.MICRO}
    )
    loops.shard_everything(teacher_plugin)
    accelerator = Accelerator(deepspeed_plugins={"student": student_plugin, "teacher": teacher_plugin})
    assert accelerator.deepspeed_plugin is student_plugin
    net, teacher_net = loops.Net(), loops.Net()
    with torch.no_grad():
        for parameter in teacher_net.parameters():
            parameter.mul_(-1.5)
    reference, teacher_reference = copy.deepcopy(net), copy.deepcopy(teacher_net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=loops.LR)
    student, optimizer, batches = accelerator.prepare(net, optimizer, loops.loader())

    accelerator.state.select_deepspeed_plugin("teacher")
    assert accelerator.deepspeed_plugin is teacher_plugin
    teacher = accelerator.prepare(teacher_net)
    teacher.eval()
    assert teacher.zero_optimization_stage() == 3 and all(p.numel() == 0 for p in teacher.module.body.parameters())
    accelerator.state.select_deepspeed_plugin("student")

    plain = torch.optim.AdamW(reference.parameters(), lr=loops.LR)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everything = list(loops.loader())
    for step, (x, _) in enumerate(batches):
        with torch.no_grad():
            target = teacher(x)
        loss = F.mse_loss(student(x), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        for number in range(ranks):
            theirs = everything[step * ranks + number][0]
            expected = F.mse_loss(reference(theirs), teacher_reference(theirs).detach())
            (expected / ranks).backward()
            if number == rank:
                torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), loops.CLIP)
        plain.step()
        plain.zero_grad()


@on_ranks(2)
@on_cpu_ranks
def test_two_trained_models() -> None:
    """Two Accelerators share the state; each trains its own model, at different stages."""
    from accelerate import Accelerator, DeepSpeedPlugin

    plugins = {
        name: loops.shard_everything(
            DeepSpeedPlugin(
                zero_stage=stage, gradient_accumulation_steps=loops.ACCUMULATION, gradient_clipping=loops.CLIP
            )
        )
        for name, stage in (("first", 3), ("second", 1))
    }
    first = Accelerator(deepspeed_plugins=plugins)
    second = Accelerator()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trained = []
    for accelerator, name, kind in ((first, "first", torch.optim.AdamW), (second, "second", torch.optim.SGD)):
        accelerator.state.select_deepspeed_plugin(name)
        net = loops.Net()

        def make(parameters, kind=kind):
            return kind(parameters, lr=loops.LR)

        _, expected = loops.plain(net, make, rank, ranks, epochs=2)
        trained.append((accelerator, *accelerator.prepare(net, make(net.parameters()), loops.loader()), expected))
    records = [[], []]
    for _ in range(2):  # taking turns
        for number, (accelerator, engine, optimizer, batches, _) in enumerate(trained):
            records[number].append(loops.accelerated(accelerator, engine, optimizer, batches))
    for (*_, expected), parts in zip(trained, records, strict=True):
        both = (sum((getattr(part, n) for part in parts), []) for n in ("losses", "norms", "rates"))
        loops.assert_same(loops.Record(*both), expected)


@on_ranks(2)
@on_cpu_ranks
def test_models_that_are_saved_together(tmp_path) -> None:
    """Two engines of one Accelerator: ``save_state`` writes a checkpoint of each, ``load_state`` reads both."""
    folder = str(tmp_path)
    from accelerate import Accelerator, DeepSpeedPlugin

    plugins = {str(stage): loops.shard_everything(DeepSpeedPlugin(zero_stage=stage)) for stage in (3, 2)}
    accelerator = Accelerator(deepspeed_plugins=plugins)
    prepared = []
    for name in plugins:
        accelerator.state.select_deepspeed_plugin(name)
        net = loops.Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=loops.LR)
        prepared.append(accelerator.prepare(net, optimizer, loops.loader()))
    for objects in prepared:
        loops.accelerated(accelerator, *objects)
    accelerator.save_state(folder)
    assert {"latest", "pytorch_model", "pytorch_model_1"} <= set(os.listdir(folder))
    expected = [loops.accelerated(accelerator, *objects) for objects in prepared]
    accelerator.load_state(folder)
    assert [loops.accelerated(accelerator, *objects) for objects in prepared] == expected


@on_ranks(2)
@on_cpu_ranks
def test_a_model_that_is_only_run() -> None:
    """``prepare(model)`` without an optimizer: stage 3 shards and runs; the results are those of the model."""
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = loops.shard_everything(DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=True))
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = loops.MICRO
    accelerator = Accelerator(deepspeed_plugin=plugin)
    net = loops.Net().eval()
    expected = copy.deepcopy(net)
    engine = accelerator.prepare(net)
    engine.eval()
    x = loops.data().tensors[0][:5]
    with torch.no_grad():
        assert torch.equal(engine(x), expected(x))
    state = accelerator.get_state_dict(engine)
    if accelerator.is_main_process:
        assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
    accelerator.free_memory()
