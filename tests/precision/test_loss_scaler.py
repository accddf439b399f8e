"""The loss scaler against torch.amp.GradScaler, and its own state machine."""

import copy
import pickle

import pytest
import torch

from deepspeed.errors import NonFiniteError
from deepspeed.precision.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScaler

SCRIPTS = {
    "growth": "." * 13,
    "one overflow": "..x.....x...........",
    "overflow run": "xx....x..x.x....xxx.........",
    "at the window's end": "...x...x....x" * 2,
    "window of one after overflow": "x." * 12,
}


def dynamic(init_scale=2.0**16, scale_window=4, min_scale=1, delayed_shift=1, consecutive_hysteresis=False, **more):
    return DynamicLossScaler(init_scale, scale_window, min_scale, delayed_shift, consecutive_hysteresis, **more)


def grad_scaler_scales(script, init_scale, window):
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=init_scale, growth_factor=2.0, backoff_factor=0.5, growth_interval=window
    )
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scales = []
    for outcome in script:
        scaler.scale(param.sum()).backward()
        param.grad.fill_(float("inf") if outcome == "x" else 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_hysteresis_one_follows_grad_scaler(script, window):
    ours = dynamic(scale_window=window)
    seen = []
    for outcome in script:
        ours.update_scale(outcome == "x")
        seen.append(ours.loss_scale)
    assert min(seen) > ours.min_scale, "the script must not reach the minimum, where the two differ on purpose"
    assert len(set(seen)) > 1
    assert seen == grad_scaler_scales(script, 2.0**16, window)


def test_growth_stops_at_the_largest_fp32_like_grad_scaler():
    ours = dynamic(init_scale=2.0**124, scale_window=2)
    seen = []
    for _ in range(12):
        ours.update_scale(False)
        seen.append(ours.loss_scale)
    assert seen == grad_scaler_scales("." * 12, 2.0**124, 2)
    assert seen[-1] == 2.0**127


def test_hysteresis_tolerates_then_halves():
    scaler = dynamic(init_scale=1024.0, scale_window=100, delayed_shift=3)
    seen = []
    for _ in range(5):
        scaler.update_scale(True)
        seen.append(scaler.loss_scale)
    assert seen == [1024, 1024, 512, 256, 128]


def test_only_a_full_window_restores_the_tolerance():
    scaler = dynamic(init_scale=1024.0, scale_window=3, delayed_shift=2)
    for overflow in (True, False, False, True):
        scaler.update_scale(overflow)
    assert scaler.loss_scale == 512
    for overflow in (False, False, False, True):
        scaler.update_scale(overflow)
    assert scaler.loss_scale == 1024, "a window of good steps doubled it and restored the tolerance"


def test_consecutive_hysteresis_restores_at_every_good_step():
    scaler = dynamic(init_scale=1024.0, scale_window=100, delayed_shift=2, consecutive_hysteresis=True)
    for overflow in (True, False, True, False, True):
        scaler.update_scale(overflow)
    assert scaler.loss_scale == 1024
    scaler.update_scale(True)
    assert scaler.loss_scale == 512


def test_overflow_at_the_minimum_raises_after_the_tolerance():
    scaler = dynamic(init_scale=2.0, min_scale=1, delayed_shift=2)
    scaler.update_scale(True)
    scaler.update_scale(True)
    assert scaler.loss_scale == 1
    with pytest.raises(NonFiniteError, match=r"step 2: .*minimum \(1;.*fp16.min_loss_scale"):
        scaler.update_scale(True)


def test_tolerance_counts_at_the_minimum_too():
    scaler = dynamic(init_scale=1.0, min_scale=1, delayed_shift=2)
    scaler.update_scale(True)
    with pytest.raises(NonFiniteError):
        scaler.update_scale(True)


def test_raising_can_be_switched_off():
    scaler = dynamic(init_scale=1.0, raise_error_at_min_scale=False)
    for _ in range(3):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1


def test_scale_never_falls_below_the_minimum():
    scaler = dynamic(init_scale=100.0, min_scale=70)
    scaler.update_scale(True)
    assert scaler.loss_scale == 70


@pytest.mark.parametrize("carry", ["state_dict", "pickle", "deepcopy"])
def test_a_restored_scaler_continues_alike(carry):
    script = [False, True, False, False, True, True, False, False, False, False]
    whole = dynamic(scale_window=3, delayed_shift=2)
    for overflow in script:
        whole.update_scale(overflow)
    first = dynamic(scale_window=3, delayed_shift=2)
    for overflow in script[:5]:
        first.update_scale(overflow)
    if carry == "state_dict":
        second = dynamic(scale_window=3, delayed_shift=2)
        second.load_state_dict(first.state_dict())
    else:
        second = pickle.loads(pickle.dumps(first)) if carry == "pickle" else copy.deepcopy(first)
    for overflow in script[5:]:
        second.update_scale(overflow)
    assert second.state_dict() == whole.state_dict()


def test_a_restored_tolerance_is_cut_to_the_setting():
    saved = dynamic(delayed_shift=4).state_dict()
    scaler = dynamic(delayed_shift=2)
    scaler.load_state_dict(saved)
    assert scaler.cur_hysteresis == 2


def test_static_scale_stays_and_scales_in_fp32():
    scaler = LossScaler(scale=1e5)
    scaler.update_scale(True)
    assert scaler.loss_scale == scaler.cur_scale == 1e5 and not scaler.dynamic
    scaled = scaler.scale_loss(torch.tensor(2.0, dtype=torch.float16))
    assert scaled.dtype == torch.float32 and scaled.item() == 2e5


def test_backward_scales_gradients():
    weight = torch.ones(2, requires_grad=True)
    LossScaler(8.0).backward(weight.sum())
    assert weight.grad.tolist() == [8.0, 8.0]


@pytest.mark.parametrize(
    ("dtype", "is_dynamic", "expected"),
    [(torch.half, True, 2.0**16), (torch.half, False, 128.0), (torch.bfloat16, True, 1.0), (torch.float32, False, 1.0)],
)
def test_create(dtype, is_dynamic, expected):
    scaler = CreateLossScaler(dtype, 128.0, is_dynamic, None)
    assert scaler.loss_scale == expected
    assert scaler.dynamic == (dtype == torch.half and is_dynamic)


def test_create_passes_the_dynamic_arguments():
    arguments = {
        "init_scale": 64.0,
        "scale_window": 7,
        "delayed_shift": 3,
        "consecutive_hysteresis": True,
        "min_scale": 2,
    }
    scaler = CreateLossScaler(torch.half, 0, True, arguments)
    assert {name: getattr(scaler, name) for name in arguments if name != "init_scale"} == {
        name: value for name, value in arguments.items() if name != "init_scale"
    }
    assert scaler.loss_scale == 64.0


@pytest.mark.parametrize(
    "bad",
    [{"scale_window": 0}, {"min_scale": 0}, {"delayed_shift": 0}, {"init_scale": 0.5}, {"init_scale": -1.0}]
    + [{"scale_factor": 1.0}],
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError):
        dynamic(**bad)


def test_arguments_that_programs_leave_out_or_name():
    scaler = DynamicLossScaler()
    assert (scaler.cur_scale, scaler.scale_factor, scaler.scale_window) == (2.0**32, 2.0, 1000)
    assert (scaler.min_scale, scaler.delayed_shift, scaler.consecutive_hysteresis) == (1, 1, False)
    by_four = CreateLossScaler(torch.half, 0, True, {"init_scale": 64.0, "scale_factor": 4.0, "scale_window": 1})
    by_four.update_scale(overflow=True)
    assert by_four.cur_scale == 16
    by_four.update_scale(overflow=False)
    assert by_four.cur_scale == 64


def test_log_lines_after_an_overflow():
    scaler = dynamic(delayed_shift=2, min_scale=2.0**15, raise_error_at_min_scale=False)
    texts = []
    for _ in range(4):
        before = scaler.loss_scale
        scaler.update_scale(overflow=True)
        texts.append(scaler.describe_change(before))
    assert texts == [
        "Loss scale stays 65536: fp16.hysteresis is 2, so the scale is halved at overflow 2",
        "Loss scale 65536 -> 32768",
        "Loss scale stays 32768: it is at fp16.min_loss_scale",
        "Loss scale stays 32768: it is at fp16.min_loss_scale",
    ]
    assert LossScaler(128.0).describe_change(128.0).startswith("Loss scale stays 128: fp16.loss_scale sets it")


@pytest.mark.parametrize("scale", [0, -1, float("inf"), float("nan")])
def test_impossible_static_scales_are_refused(scale):
    with pytest.raises(ValueError, match="positive and finite"):
        LossScaler(scale)
