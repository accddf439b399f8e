"""Clipping by global norm, alone and over model-parallel ranks."""

import math

import pytest
import torch
import torch.distributed as torch_dist

from deepspeed.comm.base.counters import counted
from deepspeed.comm.base.device import local_device
from deepspeed.precision import clipping
from deepspeed.precision.clipping import clip_grad_norm_, get_global_norm
from tests.harness import run_ranks


def parameters(*gradients: list[float] | None) -> list[torch.nn.Parameter]:
    made = []
    for values in gradients:
        parameter = torch.nn.Parameter(torch.zeros(len(values or [0.0])))
        parameter.grad = None if values is None else torch.tensor(values)
        made.append(parameter)
    return made


def test_global_norm():
    assert get_global_norm([3.0, torch.tensor(4.0)]) == 5.0
    assert get_global_norm([]) == 0.0


@pytest.mark.parametrize("norm_type", [1, 2, 3.5, math.inf])
def test_same_as_torch_on_one_process(norm_type):
    mine, theirs = (parameters([3.0, -4.0], None, [12.0]) for _ in range(2))
    norm = clip_grad_norm_(mine, 1.0, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type)
    assert torch.equal(norm, expected)
    for one, other in zip(mine, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_small_gradients_and_single_tensor_stay():
    (parameter,) = parameters([0.3, 0.4])
    assert clip_grad_norm_(parameter, 1.0).item() == pytest.approx(0.5)
    assert parameter.grad.tolist() == pytest.approx([0.3, 0.4])


class Unit:
    def get_model_parallel_rank(self) -> int:
        return torch_dist.get_rank()

    def get_model_parallel_group(self):
        return torch_dist.group.WORLD


def check_model_parallel(norm_type: float, mark: str) -> tuple[float, list[float]]:
    rank = torch_dist.get_rank()
    replicated, own = parameters([6.0], [8.0 * (rank + 1)])
    setattr(own, mark, True)
    with counted() as traffic:
        norm = clip_grad_norm_([replicated, own], 1.0, norm_type, mpu=Unit())
    assert {axis for _, axis in traffic.ran_along} == {"tensor"}
    return norm.item(), [replicated.grad.item(), own.grad.item()]


@pytest.mark.parametrize(
    ("norm_type", "mark"), [(1, "model_parallel"), (2, "tensor_model_parallel"), (math.inf, "model_parallel")]
)
def test_norm_spans_model_parallel_ranks(norm_type, mark):
    # Replicated gradients count once: the vector is (6, 8, 16).
    expected = torch.linalg.vector_norm(torch.tensor([6.0, 8.0, 16.0]), norm_type).item()
    for rank, (norm, gradients) in enumerate(run_ranks(check_model_parallel, 2, norm_type, mark)):
        assert norm == pytest.approx(expected)
        assert gradients == pytest.approx([6.0 / expected, 8.0 * (rank + 1) / expected], rel=1e-5)


def test_a_rank_without_gradients_sends_from_the_device_of_its_parameters(monkeypatch):
    devices = []

    class Channel:
        def sum(self, norm: torch.Tensor, _label: str) -> torch.Tensor:
            devices.append(norm.device.type)
            return norm

    class Ranks:
        def channel(self, device: torch.device) -> Channel:
            devices.append(device.type)
            return Channel()

    monkeypatch.setattr(clipping, "axis_of", lambda _group, _name: Ranks())
    clip_grad_norm_([torch.nn.Parameter(torch.zeros(2, device="meta"))], 1.0, mpu=Unit())
    clip_grad_norm_([], 1.0, mpu=Unit())  # as on a stage without parameters
    own = local_device().type
    assert devices == ["meta", "meta", own, own]
