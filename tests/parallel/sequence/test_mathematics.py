"""The gradient of a sharded sequence is that of the unsharded loss, at every stage, by every way to write the loss."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch.nn import functional

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence import mean_loss
from deepspeed.utils import groups
from tests.engine.support import SHARDED
from tests.harness import on_ranks, run_ranks
from tests.parallel.sequence.net import Net, batch, cut, unsharded


def _recipe(logits, labels, group):
    """As Accelerate's documentation writes it."""
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    losses = differentiable.all_gather(loss, group=group)
    good = (labels != -100).view(-1).sum()
    goods = differentiable.all_gather(good, group=group)
    total = sum(losses[rank] * goods[rank] for rank in range(len(losses)) if goods[rank] > 0)
    return total / max(sum(goods), 1)


def _one_call(logits, labels, group):
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return mean_loss(loss, labels)


def _per_token(logits, labels, group):
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return mean_loss(loss, labels, group)


def _own_share(logits, labels, group):
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return mean_loss(loss, labels, own_share=True)


LOSSES = {"recipe": _recipe, "mean_loss": _one_call, "per token": _per_token, "own share": _own_share}


def _config(stage, **more):
    zero = {"stage": stage, **(SHARDED if stage == 3 else {})}
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": zero, **more}


def _exact(size, cells):
    """Every gradient and the norm, then the parameters after two steps of two micro-batches."""
    world = dist.get_world_size()
    data = world // size
    for stage, heads, key_heads, way in cells:
        own = {"sequence_parallel": {"loss": "own_share"}} if way == "own share" else {}
        expected = Net(heads, key_heads)
        groups.set_mesh(None)
        parallel_state_sp.initialize_sequence_parallel(size)
        group = groups._get_sequence_parallel_group()
        net = Net(heads, key_heads, group)
        config = _config(stage, sequence_parallel_size=size, gradient_accumulation_steps=2, **own)
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        engine = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(trained, lr=0.5), config=config)[0]
        assert (engine.sequence_parallel_size, engine.dp_world_size, engine.seq_dp_world_size) == (size, data, world)
        assert engine.train_batch_size() == 2 * 2 * data
        rank, sample = dist.get_rank() % size, dist.get_rank() // size
        for update in range(2):
            expected.zero_grad()
            for micro in range(2):
                step = 2 * update + micro
                loss = unsharded(expected, data, step) / 2
                loss.backward()
                mine = cut(batch(sample, step), rank, size)
                found = LOSSES[way](engine(mine["ids"], mine["positions"]), mine["labels"], group)
                engine.backward(found)
                if data == 1:
                    assert found.item() == pytest.approx(2 * loss.item(), rel=1e-5)
                if micro == 1:
                    wanted = {name: p.grad for name, p in expected.named_parameters() if p.requires_grad}
                    gradients = dict(engine.iter_full("grad"))
                    assert gradients.keys() == wanted.keys()
                    for name, gradient in gradients.items():
                        difference = (gradient - wanted[name]).norm() / wanted[name].norm()
                        assert difference < 1e-5, (stage, heads, way, name, difference)
                engine.step()
            norm = torch.stack([gradient.norm() for gradient in wanted.values()]).norm().item()
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
            with torch.no_grad():
                for parameter in expected.parameters():
                    if parameter.requires_grad:
                        parameter -= 0.5 * parameter.grad
        engine.destroy()


def _cells(stages, *more):
    return [(stage, 4, 2, "recipe") for stage in stages] + list(more)


def test_two_ranks_share():
    ways = [(1, 7, 1, "mean_loss"), (2, 7, 1, "per token"), (0, 4, 2, "own share"), (3, 7, 1, "own share")]
    run_ranks(_exact, 2, 2, _cells((0, 1, 2, 3), *ways))


@pytest.mark.parametrize("size", [2, 4])
def test_four_ranks(size):
    run_ranks(_exact, 4, size, [(3, 7, 1, "mean_loss"), (0, 7, 1, "per token")])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (4, 4)])
def test_every_combination(ranks, size):
    cells = [(stage, *heads, way) for stage in range(4) for heads in ((4, 2), (7, 1)) for way in LOSSES]
    run_ranks(_exact, ranks, size, cells, timeout=600)


@on_ranks(2)
def test_groups_and_refusals() -> None:
    """Three ways to say the groups; none but the configuration needs the program."""
    rank = dist.get_rank()
    for given in ({"data_parallel_size": 1, "sequence_parallel_size": 2}, {"sequence_parallel_size": 2}):
        engine = deepspeed.initialize(model=Net(group=dist.group.WORLD), config=_config(0, **given))[0]
        assert (engine.sequence_parallel_size, engine.dp_world_size, engine.train_batch_size()) == (2, 1, 2)
        assert dist.get_world_size(engine.seq_parallel_group) == 2 == groups._get_sequence_parallel_world_size()
        assert groups._get_sequence_parallel_rank() == rank and groups._get_data_parallel_world_size() == 1
        groups.set_mesh(None)
    engine = deepspeed.initialize(model=Net(), config=_config(0), mesh_param=(1, 2))[0]
    assert (engine.sequence_parallel_size, engine.seq_dp_world_size) == (2, 2)
    groups.set_mesh(None)
    parallel_state_sp.initialize_sequence_parallel(2)
    parallel_state_sp.initialize_sequence_parallel(2)
    engine = deepspeed.initialize(model=Net(), config=_config(0), mpu=parallel_state_sp)[0]
    assert (engine.sequence_parallel_size, engine.mp_world_size, engine.dp_world_size) == (2, 1, 1)
    assert groups.get_tensor_model_parallel_world_size() == 1 == groups._get_model_parallel_world_size()
    assert parallel_state_sp.get_model_parallel_world_size() == 2 == dist.get_world_size(engine.seq_parallel_group)
    with pytest.raises(ValueError, match="at least 2 ranks"):
        parallel_state_sp.initialize_sequence_parallel(1)
    with pytest.raises(RuntimeError, match="the job has 2 ranks"):
        parallel_state_sp.initialize_sequence_parallel(3)
    summed = _config(1, gradient_allreduce_op="sum", sequence_parallel_size=2)
    net = Net()
    with pytest.raises(DeepSpeedConfigError, match='gradient_allreduce_op "sum" with 2 ranks that share a sequence'):
        deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0), config=summed)
    loss = torch.tensor(float("nan") if rank else 2.0, requires_grad=True)
    total = mean_loss(loss, torch.tensor([-100, -100] if rank else [1, -100]))
    total.backward()
    assert total.item() == 2.0 and loss.grad.item() == (0.0 if rank else 2.0)
    assert mean_loss(loss, torch.tensor([-100])).item() == 0.0
    with pytest.raises(DeepSpeedConfigError, match=r"each of the 2 labels, found a tensor of shape \(3,\)"):
        mean_loss(torch.zeros(3), torch.zeros(2))
