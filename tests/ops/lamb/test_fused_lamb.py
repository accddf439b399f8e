"""LAMB: the paper's formula on whole tensors, and the same result on fragments."""

import copy

import pytest
import torch

from deepspeed.errors import NotYetSupportedError
from deepspeed.ops.elementwise import supports_flat_update
from deepspeed.ops.fragments import FragmentTable, TensorFragment
from deepspeed.ops.lamb import FusedLamb
from tests.ops.fragments import Layout, ThreadedAxis, use_threaded_collectives

SHAPES = [(70, 3), (5,), (64,), (13, 11), (), (2, 3, 4, 5), (1,), (200,)]
OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.9, 0.99)}
STEPS = 3


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    weights[2].zero_()  # a zero norm: the ratio is 1
    return weights, [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(STEPS)]


def paper(weights, gradients, *, lr, weight_decay, betas, eps=1e-8, inside=False, correct=True, low=0.01, high=10.0):
    results, ratios = [], []
    for index, start in enumerate(weights):
        weight, m, v = start.double(), 0.0, 0.0
        for step, grads in enumerate(gradients, 1):
            grad = grads[index].double()
            m = betas[0] * m + (1 - betas[0]) * grad
            v = betas[1] * v + (1 - betas[1]) * grad**2
            m_hat, v_hat = (m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)) if correct else (m, v)
            root = (v_hat + eps).sqrt() if inside else v_hat.sqrt() + eps
            direction = m_hat / root + weight_decay * weight
            ratio = 1.0
            if weight.norm() > 0 and direction.norm() > 0:
                ratio = float(weight.norm() / direction.norm())
            ratio = min(max(ratio, low), high)
            weight = weight - lr * ratio * direction
        results.append(weight.float())
        ratios.append(ratio)
    return results, ratios


def whole(weights, gradients, **options):
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = FusedLamb(params, **options)
    for grads in gradients:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params], optimizer


@pytest.mark.parametrize("variant", [{}, {"inside": True}, {"correct": False}, {"low": 0.8, "high": 1.1}])
def test_whole_tensors_follow_the_paper(variant):
    weights, gradients = data()
    names = {"inside": "eps_inside_sqrt", "correct": "bias_correction", "low": "min_coeff", "high": "max_coeff"}
    found, optimizer = whole(weights, gradients, **OPTIONS, **{names[key]: value for key, value in variant.items()})
    expected, ratios = paper(weights, gradients, **OPTIONS, **variant)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert optimizer.get_lamb_coeffs() == pytest.approx(ratios, rel=1e-5)


@pytest.mark.parametrize(
    ("world_size", "cuts"), [(1, None), (2, None), (3, None), (4, None), (3, [64, 128]), (2, [0]), (2, [192])]
)
def test_fragments_equal_whole_tensors(monkeypatch, world_size, cuts):
    use_threaded_collectives(monkeypatch)
    weights, gradients = data()
    expected, reference = whole(weights, gradients, **OPTIONS)
    layout, group = Layout(SHAPES, world_size, cuts), ThreadedAxis(world_size)

    def rank_step(rank):
        run = torch.nn.Parameter(layout.slice_of(weights, rank))
        optimizer = FusedLamb([run], **OPTIONS)
        optimizer.attach_segments(layout.table(run, rank, group if world_size > 1 else None))
        for grads in gradients:
            run.grad = layout.slice_of(grads, rank)
            optimizer.step()
        return run.detach(), optimizer.get_lamb_coeffs()

    results = group.run(rank_step)
    for found, value in zip(layout.tensors(run for run, _ in results), expected, strict=True):
        assert torch.equal(found, value), "block norms do not depend on the cuts"
    assert all(coeffs == reference.get_lamb_coeffs() for _, coeffs in results)
    numbers = [numel for name, numel in group.calls if name == "all_reduce"]
    assert numbers == ([2 * len(SHAPES)] * STEPS if world_size > 1 else [])


def test_padding_is_left_alone():
    layout = Layout([(5,), (70,)], 1)
    run = torch.nn.Parameter(layout.flat([torch.ones(5), torch.ones(70)]))
    optimizer = FusedLamb([run], lr=0.1)
    optimizer.attach_segments(layout.table(run, 0, None))
    run.grad = torch.ones_like(run)
    run.grad[5:64] = 0
    run.grad[134:] = 0
    optimizer.step()
    assert run[5:64].abs().max() == 0 and run[134:].abs().max() == 0 and run[:5].max() < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_keep_fp32_state(dtype):
    param = torch.nn.Parameter(torch.randn(33, 7).to(dtype))
    wide = torch.nn.Parameter(param.detach().float())
    optimizers = [FusedLamb([p], lr=0.1) for p in (param, wide)]
    param.grad = torch.randn_like(param)
    wide.grad = param.grad.float()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(param.detach(), wide.detach().to(dtype))
    restored = FusedLamb([param], lr=0.1)
    restored.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert restored.state[param]["exp_avg"].dtype == torch.float32
    assert torch.equal(restored.state[param]["exp_avg"], optimizers[0].state[param]["exp_avg"])


def test_noncontiguous_parameter():
    start, grad = torch.randn(6, 9), torch.randn(6, 9)
    plain, turned = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.T.contiguous().T)
    for param in (plain, turned):
        param.grad = grad.clone()
        FusedLamb([param], lr=0.1, weight_decay=0.1).step()
    assert not turned.is_contiguous() and torch.equal(plain, turned)


def test_groups_with_their_own_bounds():
    weights, gradients = data()
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    groups = [{"params": params[:4]}, {"params": params[4:], "max_coeff": 0.5, "foreach": None, "fused": True}]
    optimizer = FusedLamb(groups, lr=0.05)
    for param, grad in zip(params, gradients[0], strict=True):
        param.grad = grad
    optimizer.step()
    coeffs = optimizer.get_lamb_coeffs()
    assert max(coeffs[4:]) == 0.5 and coeffs[0] > 0.5


def test_what_is_refused():
    param = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="AMSGrad"):
        FusedLamb([param], amsgrad=True)
    with pytest.raises(ValueError, match="AMSGrad"):
        FusedLamb([{"params": [param], "amsgrad": True}])
    with pytest.raises(NotYetSupportedError, match="gradient_clipping"):
        FusedLamb([param], max_grad_norm=1.0)
    with pytest.raises(ValueError, match="min_coeff"):
        FusedLamb([param], min_coeff=2.0, max_coeff=1.0)
    run = torch.nn.Parameter(torch.zeros(128))
    optimizer = FusedLamb([run])
    with pytest.raises(ValueError, match="multiple of 64"):
        optimizer.attach_segments(FragmentTable({id(run): (TensorFragment("w", 0, 3, 10, 0, (7,)),)}, 1))
    with pytest.raises(KeyError, match="attach_segments"):
        optimizer.attach_segments(FragmentTable({}, 1))
    assert not supports_flat_update(optimizer)


def test_new_run_without_new_table_is_refused():
    run = torch.nn.Parameter(torch.ones(64))
    optimizer = FusedLamb([run])
    optimizer.attach_segments(FragmentTable({id(run): (TensorFragment("w", 0, 0, 64, 0, (64,)),)}, 1))
    replaced = torch.nn.Parameter(torch.ones(64))
    optimizer.param_groups[0]["params"][0] = replaced
    replaced.grad = torch.ones(64)
    with pytest.raises(RuntimeError, match="call attach_segments again"):
        optimizer.step()


def test_a_copy_forgets_the_table():
    run = torch.nn.Parameter(torch.ones(64))
    optimizer = FusedLamb([run])
    optimizer.attach_segments(FragmentTable({id(run): (TensorFragment("w", 0, 0, 64, 0, (64,)),)}, 1))
    twin = copy.deepcopy(optimizer)
    twin.param_groups[0]["params"][0].grad = torch.ones(64)
    twin.step()
    assert len(twin.get_lamb_coeffs()) == 1


def test_a_rank_without_runs_takes_part(monkeypatch):
    use_threaded_collectives(monkeypatch)
    layout, group = Layout([(64,)], 2, [64]), ThreadedAxis(2)

    def rank_step(rank):
        run = torch.nn.Parameter(torch.full((64,), 2.0))
        optimizer = FusedLamb([run], lr=0.1)
        if rank == 1:
            optimizer.param_groups[0]["params"] = []
        else:
            run.grad = torch.ones(64)
        optimizer.attach_segments(FragmentTable({id(run): layout.fragments(0)} if rank == 0 else {}, 1, group))
        optimizer.step()
        return optimizer.get_lamb_coeffs()

    coeffs = group.run(rank_step)
    assert coeffs[0] == coeffs[1] == pytest.approx([2.0])
