"""How `initialize` learns how the ranks are laid out, and where that is registered: one mesh from every source."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import deepspeed
from deepspeed.comm.job import groups
from deepspeed.comm.job.job_mesh import JobMesh
from deepspeed.comm.job.mesh import Mesh
from deepspeed.config import parse
from deepspeed.config.degrees import data_parallel_size
from deepspeed.config.sections.root import Root
from deepspeed.config.sections.tensor_parallel import TensorParallel
from deepspeed.errors import DeepSpeedConfigError
from tests.engine.support import SHARDED, inputs
from tests.harness import on_ranks
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters

PATIENCE = timedelta(seconds=30)


def _engine(model, stage, **given):
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
    config["sequence_parallel"] = {"loss": "own_share"}
    config["zero_optimization"] = {"stage": stage, **(SHARDED if stage == 3 else {})}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, **given)[0]


def _members(group):
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def _by_sizes(rank):
    """Data 2 x sequence 2: each rank's loss is its share of a sequence's."""
    expected = tower()
    losses = [expected(inputs(0, other)) for other in range(4)]
    gradients = torch.autograd.grad(torch.stack(losses).sum() / 2, list(expected.parameters()))
    for stage in (0, 2, 3):
        engine = _engine(tower(), stage, mesh_param=(2, 2))
        assert (engine.dp_world_size, engine.seq_dp_world_size, engine.sequence_parallel_size) == (2, 4, 2)
        assert engine.train_batch_size() == 4 and engine.get_data_parallel_rank() == rank // 2
        assert _members(engine.get_sequence_parallel_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert (
            _members(engine.data_parallel_group) == [rank % 2, rank % 2 + 2] and engine.seq_data_parallel_group is None
        )
        assert groups._get_sequence_parallel_rank() == rank % 2 and groups._get_data_parallel_world_size() == 2
        engine.backward(engine(inputs(0, rank)))
        engine.step()
        found = full_masters(engine)
        for (name, value), gradient in zip(expected.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(found[name], value.detach() - 0.1 * gradient)
        engine.destroy()


def _by_a_device_mesh(rank):
    """Data 2 x tensor 2, and the plain model whole on tensor ranks: it counts once, in the norm and in the batch."""
    expected = tower()
    (sum(expected(inputs(0, data)) for data in range(2)) / 2).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in expected.parameters()]).item()
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    engine = _engine(tower(), 2, mesh_param=mesh)
    assert (engine.dp_world_size, engine.mp_world_size, engine.train_batch_size()) == (2, 2, 4)
    assert engine.get_tensor_parallel_rank() == engine.get_model_parallel_rank() == rank % 2
    assert _members(groups.get_tensor_model_parallel_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    engine.backward(engine(inputs(0, rank // 2)))
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    engine.destroy()
    # A second model of the process that is data-parallel alone changes nothing of what is registered.
    engine = _engine(tower(), 1)
    assert engine.dp_world_size == 4 and groups.get_tensor_model_parallel_world_size() == 2
    engine.destroy()


def _by_the_model(rank):
    """A model that is cut into stages determines them itself; its stages have different parameters."""
    model = tower(2 + rank // 2)
    model.mesh = Mesh((("pipe", 2), ("data", 2)))
    engine = _engine(model, 1)
    assert (engine.dp_world_size, engine.mp_world_size) == (2, 2)
    assert engine.get_model_parallel_rank() == rank // 2 and engine.get_tensor_parallel_rank() == 0
    assert _members(groups.group_along("pipe")) == [rank % 2, rank % 2 + 2]
    assert groups.group_along("tensor", "pipe") is groups.group_along("pipe")
    engine.backward(engine(inputs(0, rank)))
    engine.step()
    engine.destroy()


def _refuse_wrong_meshes(rank):
    _by_sizes(rank)
    _by_a_device_mesh(rank)
    _by_the_model(rank)
    _beside_the_configuration()


def _beside_the_configuration():
    root = Root(sequence_parallel_size=2, tensor_parallel=TensorParallel(autotp_size=2))
    assert JobMesh(None, None, None, PATIENCE).mesh(root).axes == (
        ("pipe", 1), ("data", 1), ("expert", 1), ("sequence", 2), ("tensor", 2),
    )  # fmt: skip
    assert JobMesh(None, None, None, PATIENCE).data_size(root) == 1
    # Beside what objects say, the degrees of the configuration are cut out of the data-parallel ranks.
    stages = Mesh((("pipe", 2), ("data", 2)))
    tensor = Root(tensor_parallel=TensorParallel(autotp_size=2))
    assert JobMesh(None, stages, None, PATIENCE).mesh(tensor) == Mesh((("pipe", 2), ("data", 1), ("tensor", 2)))
    assert JobMesh(None, (2, 2), None, PATIENCE).mesh(Root(sequence_parallel_size=2)).size("data") == 2
    with pytest.raises(
        DeepSpeedConfigError, match=r"sequence_parallel_size 2, but mesh_param gives mesh of data 1 x seq"
    ):
        JobMesh(None, (1, 4), None, PATIENCE).mesh(Root(sequence_parallel_size=2))
    with pytest.raises(DeepSpeedConfigError, match="laid out in different ways .the model: .*; mesh_param: .*give one"):
        model = tower()
        model.mesh = stages
        JobMesh(None, (2, 2), model, PATIENCE)
    with pytest.raises(DeepSpeedConfigError, match="found 'mystery'. Rename"):
        JobMesh(None, Mesh((("data", 2), ("mystery", 2))), None, PATIENCE)
    with pytest.raises(DeepSpeedConfigError, match="has 2 ranks, but the job has 4"):
        JobMesh(None, (2, 1), None, PATIENCE)
    with pytest.raises(DeepSpeedConfigError, match=r"expected the sizes \(data, sequence\)"):
        JobMesh(None, "2x2", None, PATIENCE)


@on_ranks(4)
def test_the_mesh_from_every_source() -> None:
    _refuse_wrong_meshes(dist.get_rank())


def test_what_the_degrees_leave_for_data():
    root = Root(sequence_parallel_size=2, tensor_parallel=TensorParallel(autotp_size=3))
    assert data_parallel_size(root, 24) == 4 and data_parallel_size(root, 24, stages=2) == 2
    with pytest.raises(
        DeepSpeedConfigError, match="sequence_parallel_size 2 x tensor_parallel.autotp_size 3 takes .* 6"
    ):
        data_parallel_size(root, 8)
    with pytest.raises(DeepSpeedConfigError, match="autoep_size 3: experts .* of which there are 4; choose a divisor"):
        data_parallel_size(Root(expert_parallel={"enabled": True, "autoep_size": 3}), 4)


def test_a_degree_that_does_not_fit_is_one_of_the_problems():
    config = {"train_micro_batch_size_per_gpu": 1, "train_batch": 3}

    def fails(root):
        raise DeepSpeedConfigError("the ranks do not fit")

    with pytest.raises(DeepSpeedConfigError) as caught:
        parse(config, dp_world_size=fails)
    assert len(caught.value.problems) == 2 and "the ranks do not fit" in caught.value.problems
    assert parse({"train_micro_batch_size_per_gpu": 1}, dp_world_size=lambda root: 6).batch.train_batch_size == 6
