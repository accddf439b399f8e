"""The flat update: equal to torch, and the same bits however the run is cut."""

import pytest
import torch

from deepspeed.ops import flat
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.elementwise import flat_updater, supports_flat_update, why_not_flat
from deepspeed.ops.flat import AdamRule, FlatUpdate

NUMEL = 64 * 37
STEPS = 3


def optimizers(run):
    return {
        "adamw": FusedAdam([run], lr=1e-2, weight_decay=0.1),
        "adam": FusedAdam([run], lr=1e-2, weight_decay=0.1, adam_w_mode=False),
        "uncorrected": FusedAdam([run], lr=1e-3, bias_correction=False),
        "cpu adam": DeepSpeedCPUAdam([run], lr=1e-2, weight_decay=0.1),
        "torch adamw": torch.optim.AdamW([run], lr=1e-2),
        "torch adam": torch.optim.Adam([run], lr=1e-2, weight_decay=0.1),
        "torch adagrad": torch.optim.Adagrad([run], lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
        "torch sgd": torch.optim.SGD([run], lr=1e-2),
        "torch nesterov": torch.optim.SGD([run], lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
    }


NAMES = list(optimizers(torch.zeros(64)))


def data(dtype=torch.float32, numel=NUMEL, seed=0):
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(numel, generator=generator)
    return master, [torch.randn(numel, generator=generator).to(dtype) for _ in range(STEPS)]


def updated(name, master, grads, *, cuts=(), grad_scale=None, out=None):
    """Takes a step per gradient; a run that is cut has an optimizer of its own for each part, as another rank would."""
    bounds = [0, *cuts, master.numel()]
    result = master.clone()
    states = []
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        run = torch.nn.Parameter(result[start:stop])
        optimizer = optimizers(run)[name]
        updater = flat_updater(optimizer)
        for grad in grads:
            updater.flat_update(
                optimizer.param_groups[0],
                run.detach(),
                grad[start:stop],
                optimizer.state[run],
                grad_scale=grad_scale,
                out=None if out is None else out[start:stop],
            )
        states.append({key: value for key, value in optimizer.state[run].items() if key != "step"})
    return [result, *(torch.cat([state[key] for state in states]) for key in states[0])]


def reference(name, master, grads):
    run = torch.nn.Parameter(master.clone())
    optimizer = optimizers(run)[name]
    for grad in grads:
        run.grad = grad.clone()
        optimizer.step()
    return run.detach()


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_optimizers_own_step(name):
    master, grads = data()
    torch.testing.assert_close(updated(name, master, grads)[0], reference(name, master, grads), rtol=1e-6, atol=1e-7)


def test_adamw_equals_torchs_fused_bit_for_bit():
    master, grads = data()
    run = torch.nn.Parameter(master.clone())
    fused = torch.optim.AdamW([run], lr=1e-2, weight_decay=0.1, fused=True)
    for grad in grads:
        run.grad = grad
        fused.step()
    assert torch.equal(updated("adamw", master, grads)[0], run.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_chunks_or_cuts(name, dtype):
    master, grads = data(dtype)
    whole_out = torch.empty(NUMEL, dtype=torch.bfloat16)
    whole = updated(name, master, grads, grad_scale=0.37, out=whole_out)
    for cuts in ((64,), (640, 704, 64 * 30), tuple(range(64, NUMEL, 64))):
        cut_out = torch.empty(NUMEL, dtype=torch.bfloat16)
        cut = updated(name, master, grads, cuts=cuts, grad_scale=0.37, out=cut_out)
        assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True)), cuts
        assert torch.equal(whole_out, cut_out)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("torch")])
@pytest.mark.parametrize("chunk_numel", [64, 192, 1024])
def test_chunk_length_does_not_change_bits(name, chunk_numel, monkeypatch):
    master, grads = data(torch.bfloat16)
    whole = updated(name, master, grads, grad_scale=0.37)
    monkeypatch.setattr(flat, "default_chunk_numel", lambda device: chunk_numel)
    in_chunks = updated(name, master, grads, grad_scale=0.37)
    assert all(torch.equal(a, b) for a, b in zip(whole, in_chunks, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_change_bits(name, monkeypatch):
    master, grads = data(torch.bfloat16, numel=64 * 1021)
    one = updated(name, master, grads, grad_scale=0.37)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three = updated(name, master, grads, grad_scale=0.37)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", [None, 1.0, 0.37, torch.tensor(0.37)])
def test_gradient_is_widened_then_scaled(dtype, scale):
    master, grads = data(dtype)
    factor = torch.tensor(1.0 if scale is None else float(scale), dtype=torch.float32)
    expected = updated("adamw", master, [grad.float() * factor for grad in grads])
    kept = [grad.clone() for grad in grads]
    found = updated("adamw", master, grads, grad_scale=scale)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True)), "gradients are read only"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_out_receives_the_rounded_master(dtype):
    master, grads = data()
    out = torch.full((NUMEL,), 99.0, dtype=dtype)
    new_master = updated("adamw", master, grads, out=out)[0]
    assert torch.equal(out, new_master.to(dtype))


def test_sixteen_bit_master_and_state_are_widened_for_the_arithmetic():
    master, grads = data(torch.bfloat16)
    run = torch.nn.Parameter(master.bfloat16())
    optimizer = FusedAdam([run], lr=1e-2)
    state = {"exp_avg": torch.zeros(NUMEL, dtype=torch.bfloat16)}
    optimizer.flat_update(optimizer.param_groups[0], run.detach(), grads[0], state)
    wide = updated("adamw", master.bfloat16().float(), grads[:1])
    assert state["exp_avg_sq"].dtype == torch.float32
    assert torch.equal(state["exp_avg"], wide[1].bfloat16())
    no_decay = FusedAdam([torch.nn.Parameter(master.bfloat16().float())], lr=1e-2)
    run32 = no_decay.param_groups[0]["params"][0]
    no_decay.flat_update(no_decay.param_groups[0], run32.detach(), grads[0], no_decay.state[run32])
    assert torch.equal(run.detach(), run32.detach().bfloat16())


@pytest.mark.parametrize("step", [None, 0.0, 0])
def test_step_is_counted_once_per_call(step):
    master, grads = data()
    run = torch.nn.Parameter(master)
    optimizer = FusedAdam([run])
    state = {} if step is None else {"step": step}
    for grad in grads:
        optimizer.flat_update(optimizer.param_groups[0], run.detach(), grad, state)
    assert float(state["step"]) == STEPS
    optimizer.flat_update(optimizer.param_groups[0], run.detach(), grads[0], state, advance_step=False)
    assert float(state["step"]) == STEPS


def test_slices_of_a_run_with_one_counter_equal_the_whole():
    master, grads = data()
    whole = updated("adamw", master, grads)
    run = torch.nn.Parameter(master.clone())
    optimizer = optimizers(run)["adamw"]
    state = {}
    optimizer.init_flat_state(optimizer.param_groups[0], run, state)
    for grad in grads:
        for first, (start, stop) in zip((True, False, False), ((0, 640), (640, 704), (704, NUMEL)), strict=True):
            chunk = {key: value if key == "step" else value[start:stop] for key, value in state.items()}
            optimizer.flat_update(
                optimizer.param_groups[0], run.detach()[start:stop], grad[start:stop], chunk, advance_step=first
            )
    assert torch.equal(run.detach(), whole[0]) and torch.equal(state["exp_avg_sq"], whole[2])


def test_changed_hyperparameters_take_effect_and_tensor_lr_works():
    master, grads = data()
    results = []
    for lr in (0.5, torch.tensor(0.5)):
        run = torch.nn.Parameter(master.clone())
        optimizer = FusedAdam([run], lr=1e-3)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.flat_update(optimizer.param_groups[0], run.detach(), grads[0], {})
        results.append(run.detach())
    assert torch.equal(results[0], results[1]) and (results[0] - master).abs().max() > 0.1


def test_empty_run_is_counted_too():
    run = torch.nn.Parameter(torch.empty(0))
    optimizer = FusedAdam([run])
    state = {}
    optimizer.flat_update(optimizer.param_groups[0], run.detach(), torch.empty(0), state)
    assert float(state["step"]) == 1


@pytest.mark.parametrize(
    ("grad", "out", "message"),
    [
        (torch.zeros(128), None, "grad: expected a contiguous tensor with the shape of master"),
        (torch.zeros(64, dtype=torch.int32), None, "grad: expected floating point"),
        (torch.zeros(64), torch.zeros(128)[::2], "out: expected a contiguous"),
    ],
)
def test_misfits_are_refused(grad, out, message):
    run = torch.nn.Parameter(torch.zeros(64))
    optimizer = FusedAdam([run])
    with pytest.raises(ValueError, match=message):
        optimizer.flat_update(optimizer.param_groups[0], run.detach(), grad, {}, out=out)


def test_scratch_made_in_inference_mode_is_usable_later(monkeypatch):
    monkeypatch.setattr(flat, "_buffers", flat._Scratch())
    with torch.inference_mode():
        flat.scratch("grad", 64, torch.float32, torch.device("cpu"))
    flat.scratch("grad", 64, torch.float32, torch.device("cpu")).fill_(1.0)


class Overridden(FusedAdam):
    def step(self, closure=None):
        return super().step(closure)


class Renamed(FusedAdam):
    pass


class TorchOverridden(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class TorchRenamed(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("order", [1, -1])
def test_who_supports_it(order):
    def make(cls, **arguments):
        return cls([torch.nn.Parameter(torch.zeros(64))], lr=0.1, **arguments)

    cases = [
        (make(FusedAdam), None),
        (make(Renamed), None),
        (make(Overridden), "it overrides a part of FusedAdam's step"),
        (make(torch.optim.AdamW), None),
        (make(TorchRenamed), None),
        (make(TorchOverridden), "it overrides a part of AdamW's step"),
        (make(torch.optim.AdamW, amsgrad=True), "param group 0 has amsgrad=True"),
        (make(torch.optim.SGD, momentum=0.9, dampening=0.5), "param group 0 has dampening=0.5"),
        (make(torch.optim.NAdam), "it has a step of its own"),
    ][::order]
    for optimizer, reason in cases:
        assert why_not_flat(optimizer) == reason
        assert supports_flat_update(optimizer) is (reason is None), type(optimizer)
    assert isinstance(make(FusedAdam), FlatUpdate)


@pytest.mark.parametrize("cls", [FusedAdam, torch.optim.AdamW])
def test_a_torch_scheduler_does_not_hide_it(cls):
    """Torch's schedulers put a wrapper of ``step`` on the optimizer object."""
    optimizer = cls([torch.nn.Parameter(torch.zeros(64))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer) and supports_flat_update(optimizer)


def test_the_initial_state_that_a_caller_changes_is_not_that_of_the_rule():
    rule = AdamRule()
    rule.initial_state({})["exp_avg"] = 1.0
    assert rule.initial_state({}) == {"exp_avg": 0.0, "exp_avg_sq": 0.0}
