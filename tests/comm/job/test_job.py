"""The job: one per life of the process group, with all that belongs to it; simulated ones; and one after another."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

import deepspeed
from deepspeed.axes import DATA, EXPERT, SEQUENCE, TENSOR
from deepspeed.comm.base.counters import JOB, traffic
from deepspeed.comm.job.fake import FakeGroup, FakeJob
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.comm.transports.transport import LocalTransport, Transport, transfer_key
from deepspeed.errors import CallOrderError, CommunicationError, DeepSpeedConfigError
from deepspeed.utils import groups
from tests.harness import run_ranks

CPU = torch.device("cpu")


def _sum(transport: Transport, value: float) -> float:
    rows = transport.gather_small(torch.tensor([value], dtype=torch.float64), channel="call", label="a test")
    return float(rows.sum())


def _train() -> float:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    return float(engine(torch.ones(2, 8)).sum())


# -- one rank ----------------------------------------------------------------------------------------------------------


def test_without_a_process_group_there_is_a_job_of_nobody():
    job = Job.adopt()
    assert Job.current() is job and not job.ranks.is_initialized()
    assert isinstance(job.axis_of().transport(), LocalTransport)
    assert (job.axis_of().size, job.axis_of().place, job.axis_of().members) == (1, 0, (0,))
    with pytest.raises(CallOrderError, match="the job has no mesh yet"):
        job.axis(TENSOR)


class _Fake(FakeJob):
    """Transports of nobody, which say between whom they would be."""

    def __init__(self, rank: int, layout: Mesh) -> None:
        super().__init__(rank, layout, "gloo", None)

    def transport(self, device, ranks=None, axis=DATA):
        made = LocalTransport()
        made.axis = axis
        made.ranks = tuple(range(self.size) if ranks is None else ranks)
        return made


def test_a_fake_job_stands_for_ranks_that_do_not_exist():
    mesh = Mesh(((DATA, 2), (SEQUENCE, 3), (TENSOR, 2)))
    before = Job.adopt()
    with _Fake(7, mesh).as_current() as job:
        assert Job.current() is job and Job.current() is not before
        assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()) == (7, 12)
        groups.set_mesh(mesh)
        assert groups.get_tensor_model_parallel_group() == FakeGroup((6, 7))
        axis = job.axis(SEQUENCE)
        assert (axis.members, axis.place, axis.size) == ((7, 9, 11), 0, 3)
        assert axis.transport().ranks == (7, 9, 11) and axis.transport().axis == SEQUENCE
        layers = axis.transport("layers", device=CPU)
        assert layers is job.axis_of(axis.group, SEQUENCE).transport("layers", device=CPU)
        assert layers is axis.channel(CPU).transport and layers is not axis.transport()
        job.experts.declare(3, mesh=mesh)
        sharing = job.axis(EXPERT, size=3, device=CPU)
        assert (sharing.members, sharing.transport("layers").axis) == ((7, 9, 11), EXPERT)
        job.declared.define("pairs", [[first, first + 1] for first in range(0, 12, 2)])
        assert job.declared.defined()["pairs"].of(7) == (6, 7)
    assert Job.current() is before and groups.mesh is None and not before.declared.defined()


def test_a_mesh_that_does_not_fit_leaves_the_one_before():
    mesh = Mesh(((DATA, 2), (TENSOR, 2)))
    with _Fake(1, mesh).as_current() as job:
        job.set_mesh(mesh)
        with pytest.raises(DeepSpeedConfigError, match="has 2 ranks, but the job has 4"):
            job.set_mesh(Mesh(((DATA, 2),)))
        assert job.mesh == mesh and groups.get_tensor_model_parallel_group() == FakeGroup((0, 1))


def test_what_a_fake_job_has_of_its_own_is_made_in_the_place_of_a_class():
    job = _Fake(0, Mesh(((DATA, 2),)))
    job.substitutes[dict] = lambda *arguments: ("made", *arguments)
    assert job.make(dict, 1) == ("made", 1) and Job.current().make(tuple, [1]) == (1,)


def test_a_group_that_the_program_starts_is_adopted_by_public_calls_only():
    nobody = Job.adopt()
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):  # the first call changed nothing
            with pytest.raises(CallOrderError, match=r"Call deepspeed\.init_distributed\(\) after init_process_group"):
                Job.current()
        assert deepspeed.comm.get_world_size() == 1 and groups.mesh is None
        adopted = Job.current()
        assert adopted is not nobody and adopted is Job.adopt()
        groups.set_mesh(Mesh(((DATA, 1),)))
    finally:
        torch_dist.destroy_process_group()
    assert Job.current().mesh is None and Job.current() is not Job.current()  # of no ranks, and not opened
    assert Job.adopt() is Job.current()


# -- several ranks -----------------------------------------------------------------------------------------------------


def _axes():
    job = Job.open(Mesh(((DATA, 2), (TENSOR, 2))), CPU)
    tensor, data = job.axis(TENSOR), job.axis(DATA)
    rank = torch_dist.get_rank()
    assert Job.current() is job and groups.mesh is job.mesh
    assert tensor.members == (rank // 2 * 2, rank // 2 * 2 + 1) and tensor.place == rank % 2
    assert tensor.group is groups.get_tensor_model_parallel_group() is job.axis(TENSOR).group
    engine, outside, layers = (tensor.transport(use) for use in ("engine", "outside engines", "layers"))
    assert tensor.transport() is not engine and tensor.transport("outside engines") is outside
    assert job.axis(TENSOR).transport("layers") is layers and len({engine, outside, layers}) == 3
    assert engine.axis == layers.axis == TENSOR
    return [_sum(one, rank) for one in (engine, outside, layers)], _sum(data.transport(), rank)


def test_an_axis_has_one_transport_for_each_use():
    assert run_ranks(_axes, 4) == [([1.0] * 3, 2.0), ([1.0] * 3, 4.0), ([5.0] * 3, 2.0), ([5.0] * 3, 4.0)]


def _closed():
    first = Job.adopt()
    kept = first.axis_of().transport("outside engines")
    first.declared.define("all", [range(2)])
    groups.set_mesh(Mesh(((TENSOR, 2),)))
    watch = first.watched.watch
    first.close()
    second = Job.adopt()
    assert second is not first and second.watched.watch is not watch
    assert groups.mesh is None and not second.declared.defined()
    with pytest.raises(CommunicationError, match="belongs to a job that is over"):
        kept.all_gather(torch.zeros(2), key=transfer_key(0, 0, 0, 1), label="a test").wait()
    return _sum(second.axis_of().transport("outside engines"), 1.0)


def test_what_belonged_to_a_job_that_was_closed_is_used_no_more():
    assert run_ranks(_closed, 2) == [2.0, 2.0]


def _start(folder: str, name: str, rank: int, size: int) -> Job:
    url = f"file://{Path(folder) / name}"
    torch_dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    return Job.adopt()


def _one_after_another(folder: str) -> list[tuple[int, float, float]]:
    """Four ranks; then two jobs of two; then one of three and one of one; then four again."""
    rank = int(os.environ["RANK"])
    seen, jobs = [], []
    for number, layout in enumerate([[4], [2, 2], [3, 1], [4]]):
        which = next(place for place in range(len(layout)) if rank < sum(layout[: place + 1]))
        first = sum(layout[:which])
        job = _start(folder, f"{number}-{which}", rank - first, layout[which])
        assert job not in jobs and job.mesh is None and not job.declared.defined()
        jobs.append(job)
        everybody = job.axis_of()
        assert everybody.members == tuple(range(layout[which])) and everybody.place == rank - first
        if layout[which] % 2 == 0:
            Job.open(Mesh(((DATA, layout[which] // 2), (TENSOR, 2))))
            assert Job.current().axis(TENSOR).size == 2
            Job.current().set_mesh(None)
        Job.current().declared.define("all", [range(layout[which])])
        total = _sum(Job.current().axis_of().transport("outside engines"), rank)
        seen.append((layout[which], total, _train()))
        if number % 2:
            Job.current().close()  # as well as being noticed
        torch_dist.destroy_process_group()
    return seen


def test_jobs_of_other_ranks_follow_each_other_in_one_process(tmp_path):
    for rank, seen in enumerate(run_ranks(_one_after_another, 4, str(tmp_path), backend=None)):
        assert [size for size, _, _ in seen] == [4, 2, 3 if rank < 3 else 1, 4]
        assert [total for _, total, _ in seen] == [6, 1 if rank < 2 else 5, 3, 6]
        assert len({round(loss, 4) for _, _, loss in seen}) == 1  # all samples are equal


def _axes_of_exchanges() -> dict[str, set[str]]:
    """Which axes the exchanges outside engines are counted under, on a mesh that divides the model, and on one that
    does not."""
    found = {}
    for name, mesh in {"divided": Mesh(((DATA, 2), (TENSOR, 2))), "data": Mesh(((DATA, 2), (SEQUENCE, 2)))}.items():
        job = Job.open(mesh, CPU)
        pairs = [torch_dist.new_group([0, 1]), torch_dist.new_group([2, 3])]
        own = pairs[job.ranks.rank_in() // 2]
        traffic.reset()
        _sum(job.axis_of().transport("outside engines"), 1.0)
        _sum(job.axis_of(own, EXPERT).transport("outside engines"), 1.0)
        gather_objects(job.axis_of().objects(patience=timedelta(seconds=60), why="a test"), "", label="a test")
        found[name] = {axis for _, axis in traffic.ran_along}
        job.close()
    return found


def test_what_all_ranks_exchange_is_counted_under_the_job_where_the_model_is_divided():
    assert run_ranks(_axes_of_exchanges, 4) == [{"divided": {JOB, EXPERT}, "data": {DATA, EXPERT}}] * 4
