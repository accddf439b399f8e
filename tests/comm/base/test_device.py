"""Which device a process takes, by an accelerator that records what it is asked for."""

import argparse
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed import comm
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.torch_device import CUDAAccelerator
from deepspeed.cli import bench
from deepspeed.comm.base.device import bound_device, local_device, unbound
from deepspeed.comm.job.job import Job
from deepspeed.comm.start import process_group
from deepspeed.errors import CommunicationError, DeepSpeedConfigError
from tests.harness import on_ranks


class Recorder(CUDAAccelerator):
    """GPUs that only count: what is current, and in which order devices are set."""

    def __init__(self, devices: int, current: int = 0) -> None:
        super().__init__()
        self.devices, self.current = devices, current
        self.calls: list[Any] = []

    def device_count(self) -> int:
        return self.devices

    def current_device(self) -> int:
        return self.current

    def set_device(self, index: int) -> None:
        assert index < self.devices, "CUDA error: invalid device ordinal"
        self.current = index
        self._has_set_device = True
        self.calls.append(("set_device", index))

    def is_available(self) -> bool:
        return True


@pytest.fixture
def gpus(monkeypatch):
    """Makes ``Recorder`` objects the accelerator; the process group that a test starts is destroyed."""
    before = get_accelerator()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is taken away at the end if the test's process group sets it
        monkeypatch.delenv(name)

    def install(devices: int, *, local_rank: int | None = None, current: int = 0) -> Recorder:
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        recorder = Recorder(devices, current)
        set_accelerator(recorder)
        return recorder

    yield install
    set_accelerator(before)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def started(monkeypatch):
    """Arguments with which torch is asked for a process group; the group is gloo's, of one rank."""
    real, calls = dist.init_process_group, []

    def start(backend: str, **arguments: Any) -> None:
        recorder = get_accelerator()
        assert isinstance(recorder, Recorder)
        recorder.calls.append("init_process_group")
        calls.append((backend, arguments.pop("device_id", None)))
        real("gloo", **arguments)
        dist.group.WORLD.bound_device_id = calls[-1][1]

    monkeypatch.setattr(process_group.torch_dist, "init_process_group", start)
    return calls


@pytest.mark.parametrize(
    ("devices", "local_rank", "current", "expected"),
    [
        (8, 3, 0, 3),
        (8, None, 0, 0),
        (1, 3, 0, 0),  # one visible device per task
        (8, 3, 5, 5),  # the program has called set_device
    ],
)
def test_init_distributed_chooses_before_it_starts_the_group(gpus, started, devices, local_rank, current, expected):
    recorder = gpus(devices, local_rank=local_rank, current=current)
    comm.init_distributed(verbose=False)
    assert recorder.calls == [("set_device", expected), "init_process_group"]
    assert started == [("nccl", torch.device("cuda", expected))]
    assert bound_device() == torch.device("cuda", expected)


def test_gloo_takes_no_device(gpus, started):
    recorder = gpus(8, local_rank=3)
    comm.init_distributed("gloo", verbose=False)
    assert recorder.calls == ["init_process_group"] and started == [("gloo", None)]


def test_an_adopted_group_gets_a_device(gpus, monkeypatch):
    recorder = gpus(8, local_rank=3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    comm.init_distributed(verbose=False)
    assert recorder.calls == []  # the host's group
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    comm.init_distributed(verbose=False)
    assert recorder.calls == [("set_device", 3)]


def test_the_device_that_the_program_gave_its_group_counts(gpus):
    recorder = gpus(8, local_rank=3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 6)
    assert local_device() == torch.device("cuda", 6)
    recorder.current = 2
    with pytest.raises(CommunicationError, match="bound to cuda:6 .* uses cuda:2"):
        local_device()


def test_device_zero_counts_where_it_was_set_by_name(gpus):
    recorder = gpus(8, local_rank=3)
    get_accelerator().set_device(0)
    assert local_device() == torch.device("cuda", 0)
    assert recorder.calls == [("set_device", 0)] * 2


@pytest.mark.parametrize("local_rank", [2, 7])
def test_a_device_that_does_not_exist(gpus, local_rank):
    gpus(2, local_rank=local_rank)
    with pytest.raises(CommunicationError, match=rf"LOCAL_RANK={local_rank}: .* sees 2 of them .*CUDA_VISIBLE_DEVICES"):
        local_device()
    with pytest.raises(CommunicationError, match="device_rank=5: must be"):
        local_device(5)


def test_a_local_rank_that_is_no_number(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(CommunicationError, match="LOCAL_RANK='first': must be a whole number"):
        local_device()


class Chosen(BaseException):
    """Ends a call where it has chosen its device."""


def _model() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


CONFIG = {"train_micro_batch_size_per_gpu": 1}
ENTRIES = {
    "init_distributed": lambda: deepspeed.init_distributed(verbose=False),
    "initialize": lambda: deepspeed.initialize(model=_model(), config=CONFIG),
    "init_inference": lambda: deepspeed.init_inference(_model(), dtype=torch.float32),
    "init_inference, tp": lambda: deepspeed.init_inference(_model(), tensor_parallel={"tp_size": 2}),
    "zero.Init": lambda: deepspeed.zero.Init(),
    "ds_bench": lambda: bench._measure(argparse.Namespace()),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("devices", "expected"), [(8, 3), (1, 0)])
def test_every_entry_chooses_before_any_group_exists(gpus, monkeypatch, entry, devices, expected):
    recorder = gpus(devices, local_rank=3)

    def set_device(index: int) -> None:
        assert not dist.is_initialized()
        raise Chosen(index)

    monkeypatch.setattr(recorder, "set_device", set_device)
    with pytest.raises(Chosen) as found:
        ENTRIES[entry]()
    assert found.value.args == (expected,)


@pytest.mark.parametrize("entry", ["initialize", "zero.Init", "init_inference"])
def test_entries_beside_a_group_that_somebody_else_started(gpus, monkeypatch, entry):
    recorder = gpus(8, local_rank=3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def set_device(index: int) -> None:
        raise Chosen(index)

    monkeypatch.setattr(recorder, "set_device", set_device)
    with pytest.raises(Chosen) as found:
        ENTRIES[entry]()
    assert found.value.args == (3,)


def test_the_arguments_of_the_script_come_first(gpus, monkeypatch):
    recorder = gpus(8, local_rank=3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    recorder.current = 2

    def set_device(index: int) -> None:
        raise Chosen(index)

    monkeypatch.setattr(recorder, "set_device", set_device)
    with pytest.raises(Chosen) as found:
        deepspeed.initialize(args=argparse.Namespace(device_rank=6), model=_model(), config=CONFIG)
    assert found.value.args == (6,)


def test_groups_are_made_as_if_no_device_were_bound(gpus, monkeypatch):
    """Of a bound job torch makes groups by a collective of all ranks, which these calls are not."""
    gpus(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    seen: list[Any] = []
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: seen.append(bound_device()))
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    Job.adopt().process_groups.alone()
    comm.new_group([0], use_local_synchronization=True)
    assert seen == [None, None] and bound_device() == torch.device("cuda", 0)
    with pytest.raises(RuntimeError), unbound():
        raise RuntimeError
    assert bound_device() is not None


@on_ranks(2)
def test_gloo_is_refused_for_device_memory() -> None:
    set_accelerator(Recorder(2))
    device = torch.device("cuda", 0)
    with pytest.raises(DeepSpeedConfigError) as refused:
        Job.adopt().axis_of().transport(device=device)
    Job.adopt().axis_of().transport()  # for host memory
    text = str(refused.value)
    assert "backend 'gloo'" in text and "cuda:0" in text and "'cpu:gloo,cuda:nccl'" in text
