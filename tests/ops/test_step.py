"""The optimizers by themselves, on ordinary parameters."""

import copy
import io
import pickle

import pytest
import torch

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

SHAPES = [(3, 5), (7,), (), (2, 3, 4, 5), (0,), (1, 1)]
ALL = [FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad]
FOREIGN = {"foreach": None, "fused": True, "maximize": False, "capturable": False, "differentiable": False}


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def fill_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(optimizer, params, steps=3, first_seed=100):
    for step in range(steps):
        fill_grads(params, first_seed + step)
        optimizer.step()
    return [param.detach().clone() for param in params]


def assert_equal(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def lion_reference(params, steps, lr, betas, weight_decay, sign=1):
    momenta = [torch.zeros_like(param) for param in params]
    values = [param.detach().clone() for param in params]
    for step in range(steps):
        fill_grads(params, 100 + step)
        for value, momentum, param in zip(values, momenta, params, strict=True):
            grad = sign * param.grad
            update = torch.sign(betas[0] * momentum + (1 - betas[0]) * grad)
            value.mul_(1 - lr * weight_decay).sub_(lr * update)
            momentum.mul_(betas[1]).add_(grad, alpha=1 - betas[1])
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("decoupled", [True, False])
def test_fused_adam_equals_torchs_fused(dtype, decoupled):
    ours, theirs = parameters(dtype), parameters(dtype)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, lr=0.01, weight_decay=0.1, fused=True)
    optimizer = FusedAdam(ours, lr=0.01, weight_decay=0.1, adam_w_mode=decoupled)
    assert_equal(train(optimizer, ours), train(reference, theirs))
    assert optimizer.state[ours[0]]["exp_avg"].dtype == dtype


@pytest.mark.parametrize("maximize", [False, True])
def test_cpu_adam_equals_torch(maximize):
    ours, theirs = parameters(), parameters()
    groups = [{"params": ours, "maximize": maximize}]
    reference = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, maximize=maximize)
    found, expected = train(DeepSpeedCPUAdam(groups, lr=0.01, weight_decay=0.1), ours), train(reference, theirs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("cls", [FusedLion, DeepSpeedCPULion])
def test_lion_follows_the_paper(cls, maximize):
    ours = parameters()
    optimizer = cls([{"params": ours, "maximize": maximize}], lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    reference = lion_reference(parameters(), 3, 0.01, (0.8, 0.95), 0.1, sign=-1 if maximize else 1)
    for a, b in zip(train(optimizer, ours), reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert set(optimizer.state[ours[0]]) == {"exp_avg"}


def test_adagrad_equals_torch():
    ours, theirs = parameters(), parameters()
    found = train(DeepSpeedCPUAdagrad(ours, lr=0.1, weight_decay=0.1), ours)
    for a, b in zip(found, train(torch.optim.Adagrad(theirs, lr=0.1, weight_decay=0.1), theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cls", [DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_state_of_sixteen_bit_parameters(cls, dtype):
    """The step is that of fp32, rounded once."""
    narrow = parameters(dtype)
    wide = [torch.nn.Parameter(param.detach().float()) for param in narrow]
    fill_grads(narrow, 5)
    for param, source in zip(wide, narrow, strict=True):
        param.grad = source.grad.float()
    optimizers = [cls(narrow, lr=0.01), cls(wide, lr=0.01)]
    for optimizer in optimizers:
        optimizer.step()
    assert_equal([param.detach() for param in narrow], [param.detach().to(dtype) for param in wide])
    for name, value in optimizers[0].state[narrow[0]].items():
        assert value.dtype == torch.float32, name
        assert torch.equal(value, optimizers[1].state[wide[0]][name])


def test_state_can_stay_in_the_dtype_of_the_parameter():
    params = parameters(torch.bfloat16)
    optimizer = DeepSpeedCPUAdam(params, fp32_optimizer_states=False)
    train(optimizer, params)
    assert optimizer.state[params[0]]["exp_avg_sq"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", ALL)
def test_memory_layout_does_not_matter(cls, dtype):
    start, grad = torch.randn(2, 4, 3, 5).to(dtype), torch.randn(2, 4, 3, 5).to(dtype)
    spaced = torch.zeros(2, 4, 3, 10, dtype=dtype)[..., ::2]
    layouts = [
        start.clone(),
        start.clone(memory_format=torch.channels_last),
        start.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        spaced.copy_(start),
    ]
    results = []
    for layout in layouts:
        for grad_format in (torch.contiguous_format, torch.channels_last):
            param = torch.nn.Parameter(layout.clone() if layout is not spaced else layout)
            with torch.no_grad():
                param.copy_(start)
            optimizer = cls([param], lr=0.1, weight_decay=0.1)
            for _ in range(2):
                param.grad = grad.clone(memory_format=grad_format)
                optimizer.step()
            results.append(param.detach())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", ALL)
def test_groups_of_a_torch_optimizer_are_taken(cls):
    params = parameters()
    groups = torch.optim.AdamW([{"params": params[:3], "lr": 0.5}, {"params": params[3:]}], lr=0.01).param_groups
    optimizer = cls(groups, lr=0.1, weight_decay=0.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.01]
    assert set(FOREIGN) <= set(optimizer.param_groups[0])
    before = [param.detach().clone() for param in params]
    after = train(optimizer, params, steps=1)
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.numel())


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("how", ["state_dict", "saved", "deepcopy", "pickle"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_continues_alike(cls, how, dtype):
    params = parameters(dtype)
    expected = train(cls(params, lr=0.01), params, steps=4)
    params = parameters(dtype)
    optimizer = cls(params, lr=0.01)
    train(optimizer, params, steps=2)
    if how in ("state_dict", "saved"):
        state = optimizer.state_dict()
        if how == "saved":
            torch.save(state, buffer := io.BytesIO())
            buffer.seek(0)
            state = torch.load(buffer, weights_only=True)
        optimizer = cls(params, lr=77.0)
        optimizer.load_state_dict(state)
    else:
        both = (optimizer, params)
        optimizer, params = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert_equal(train(optimizer, params, steps=2, first_seed=102), expected)


def test_copies_keep_the_kind_of_weight_decay():
    optimizer = FusedAdam(parameters(), adam_w_mode=False)
    assert copy.deepcopy(optimizer).adam_w_mode is False
    assert pickle.loads(pickle.dumps(optimizer)).adam_w_mode is False


def test_state_dicts_fit_torchs_adamw_both_ways():
    ours, theirs = parameters(), parameters()
    optimizer = FusedAdam(ours, lr=0.01, weight_decay=0.01)
    reference = torch.optim.AdamW(theirs, lr=0.01, fused=True)
    train(optimizer, ours, steps=1)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, source in zip(theirs, ours, strict=True):
        param.data.copy_(source)
    for group in reference.param_groups:
        group["fused"] = True
    train(reference, theirs, steps=1, first_seed=101)
    train(optimizer, ours, steps=1, first_seed=101)
    assert_equal(ours, theirs)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert_equal(train(optimizer, ours, steps=1), train(reference, theirs, steps=1))


def test_steps_are_counted_per_parameter():
    params = parameters()
    optimizer = FusedAdam(params, lr=0.01)
    reference_params = parameters()
    reference = torch.optim.AdamW(reference_params, lr=0.01, weight_decay=0, fused=True)
    for group in (params, reference_params):
        fill_grads(group, 1)
        group[1].grad = None
    optimizer.step()
    reference.step()
    assert_equal(train(optimizer, params), train(reference, reference_params))
    assert optimizer.state[params[1]]["step"] == 3 and optimizer.state[params[0]]["step"] == 4


def test_no_bias_correction():
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.tensor([1.0, -2.0, 3.0])
    FusedAdam([param], lr=0.1, bias_correction=False, eps=0.0).step()
    expected = -0.1 * (0.1 * param.grad) / (0.001 * param.grad**2).sqrt()
    torch.testing.assert_close(param.detach(), expected)


@pytest.mark.parametrize("cls", ALL)
def test_closure_hooks_and_schedulers(cls):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = cls([param], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("hook"))

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    scheduler.step()
    assert seen == ["hook"] and optimizer.param_groups[0]["lr"] == 0.05 and param.max() < 1


@pytest.mark.parametrize("cls", [FusedAdam, FusedLion])
@pytest.mark.parametrize("drop", [True, False])
def test_set_grad_none(cls, drop):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = cls([param], set_grad_none=drop)
    param.grad = torch.ones(3)
    optimizer.zero_grad()
    assert (param.grad is None) == drop
    param.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=not drop)
    assert (param.grad is None) == (not drop)


def test_one_group_can_step_alone():
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = DeepSpeedCPUAdam([{"params": [first]}, {"params": [second]}], lr=0.1)
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    optimizer.step_subgroup(1)
    assert first.min() == 1 and second.max() < 1
    with pytest.raises(IndexError, match="subgroup_id 2: expected 0 to 1"):
        optimizer.step_subgroup(2)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_rollback_undoes_a_step(decoupled, maximize):
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(50))
    groups = [{"params": [param], "maximize": maximize}]
    optimizer = DeepSpeedCPUAdam(groups, lr=0.01, weight_decay=0.1, adamw_mode=decoupled)
    with pytest.raises(RuntimeError, match="at least one step to roll back, found none"):
        param.grad = torch.randn(50)
        optimizer.rollback_subgroup(0)
    for _ in range(3):
        param.grad = torch.randn(50)
        optimizer.step()
    before, state = param.detach().clone(), copy.deepcopy(optimizer.state[param])
    param.grad = torch.randn(50)
    optimizer.step()
    optimizer.rollback_subgroup(0)
    torch.testing.assert_close(param.detach(), before, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.state[param], state, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad])
def test_amsgrad_is_refused(cls):
    with pytest.raises(ValueError, match="AMSGrad"):
        cls(parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="AMSGrad"):
        cls([{"params": parameters(), "amsgrad": True}])


@pytest.mark.parametrize("cls", ALL)
def test_bad_numbers_are_refused(cls):
    bad = [{"lr": -1.0}, {"weight_decay": -1.0}, {"lr": float("nan")}, {"lr": torch.ones(2)}]
    bad += [{"betas": (1.0, 0.9)}] if cls is not DeepSpeedCPUAdagrad else [{"eps": -1.0}]
    for arguments in bad:
        with pytest.raises(ValueError, match=cls.__name__):
            cls(parameters(), **arguments)


def test_sparse_and_complex_are_refused():
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        FusedAdam(embedding.parameters()).step()
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    param.grad = torch.zeros_like(param)
    with pytest.raises(RuntimeError, match="complex64"):
        FusedAdam([param]).step()


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms", "grad_scaler"])
def test_historical_arguments_are_refused(name):
    with pytest.raises(RuntimeError, match=f"{name} has no effect"):
        FusedAdam(parameters()).step(**{name: 1.0})


def test_adagrad_tolerates_what_integrations_send():
    DeepSpeedCPUAdagrad(parameters(), lr=0.1, weight_decay=0.0, adamw_mode=True)
