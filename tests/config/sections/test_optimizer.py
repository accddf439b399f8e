"""Names and parameters of optimizers and schedules, against torch and against this package's own classes."""

import inspect
from typing import Any

import pytest
import torch

from deepspeed.config.describe import default_of, spellings
from deepspeed.config.sections import optimizer as optimizers
from deepspeed.config.sections import scheduler as schedules
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.build import build_optimizer
from tests.config.support import only_problem, problems, read


def params(name: str, **given: Any) -> dict[str, Any]:
    section = read({"optimizer": {"type": name, "params": given}}).root.optimizer
    assert section is not None
    return section.params


def arguments(function: Any, *left_out: str) -> dict[str, Any]:
    signature = inspect.signature(function)
    return {name: each.default for name, each in signature.parameters.items() if name not in ("self", *left_out)}


def as_declared(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *optimizers.TORCH_OPTIMIZERS.items(),
        ("SGD", optimizers.SGDParams),
        ("Adam", optimizers.TorchAdamParams),
        ("AdamW", optimizers.TorchAdamWParams),
    ],
)
def test_parameters_of_torch_optimizers(name: str, model: Any) -> None:
    import torch

    ours = {"torch_adam", "adam_w_mode", "decoupled_weight_decay"}
    wanted = arguments(getattr(torch.optim, name), "params")
    assert set(model.model_fields) - ours == set(wanted) - ours
    for argument, default in wanted.items():
        assert default_of(model.model_fields[argument]) == as_declared(default)


def test_every_class_of_torch_optim_has_a_verdict() -> None:
    import torch

    classes = {
        name
        for name, each in vars(torch.optim).items()
        if inspect.isclass(each) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    }
    known = {*optimizers.OWN_OPTIMIZERS, *optimizers.TORCH_OPTIMIZERS, *optimizers.NOT_ELEMENTWISE}
    assert classes <= known


@pytest.mark.parametrize(("name", "model"), schedules.TORCH_SCHEDULERS.items())
def test_parameters_of_torch_schedules(name: str, model: Any) -> None:
    import torch

    wanted = arguments(getattr(torch.optim.lr_scheduler, name), "optimizer", "verbose")
    assert set(model.model_fields) == set(wanted)
    for argument, default in wanted.items():
        required = default is inspect.Parameter.empty
        assert model.model_fields[argument].is_required() == required
        assert required or default_of(model.model_fields[argument]) == default


def test_every_class_of_torch_schedules_has_a_verdict() -> None:
    import torch

    base = torch.optim.lr_scheduler.LRScheduler
    classes = {
        name
        for name, each in vars(torch.optim.lr_scheduler).items()
        if inspect.isclass(each) and issubclass(each, base) and not name.startswith("_") and each is not base
    }
    assert classes <= {*schedules.TORCH_SCHEDULERS, *schedules.UNUSABLE_SCHEDULERS}


@pytest.mark.parametrize(("name", "model"), schedules.OWN_SCHEDULERS.items())
def test_parameters_of_our_schedules(name: str, model: Any) -> None:
    import deepspeed.schedulers

    wanted = arguments(getattr(deepspeed.schedulers, name), "optimizer")
    assert set(model.model_fields) == set(wanted)
    for argument, default in wanted.items():
        required = default is inspect.Parameter.empty
        assert model.model_fields[argument].is_required() == required
        assert required or default_of(model.model_fields[argument]) == default


@pytest.mark.parametrize("name", ["adam", "ADAMW", "Lion", "lamb", "muon", "sgd", "adagrad"])
def test_our_names_in_any_case(name: str) -> None:
    section = read({"optimizer": {"type": name}}).root.optimizer
    assert section is not None and section.type in optimizers.OWN_OPTIMIZERS


def test_names_of_torch_are_exact() -> None:
    assert 'did you mean "RMSprop"?' in only_problem({"optimizer": {"type": "rmsprop"}})


def test_an_unknown_name_lists_the_known_ones() -> None:
    text = only_problem({"optimizer": {"type": "Adan"}})
    assert text.startswith('optimizer.type: "Adan" is no known optimizer')
    assert all(name in text for name in (*optimizers.OWN_OPTIMIZERS, *optimizers.TORCH_OPTIMIZERS))
    text = only_problem({"scheduler": {"type": "warmuplr"}})
    assert 'did you mean "WarmupLR"?' in text
    assert all(name in text for name in (*schedules.OWN_SCHEDULERS, *schedules.TORCH_SCHEDULERS))


@pytest.mark.parametrize("name", [*optimizers.MISSING_OPTIMIZERS, *optimizers.NOT_ELEMENTWISE])
def test_optimizers_that_cannot_be_are_refused_by_name(name: str) -> None:
    assert only_problem({"optimizer": {"type": name, "params": {"lr": 1}}}).startswith(f"optimizer.type: {name} ")


@pytest.mark.parametrize("name", schedules.UNUSABLE_SCHEDULERS)
def test_schedules_that_cannot_be_are_refused_by_name(name: str) -> None:
    assert only_problem({"scheduler": {"type": name}}).startswith(f"scheduler.type: {name} ")


def test_given_parameters_are_coerced_and_no_default_is_added() -> None:
    given = params("AdamW", lr="1e-3", betas=(0.9, 0.95), weight_decay=1, bias_correction="yes")
    assert given == {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 1.0, "bias_correction": True}
    assert list(given) == ["lr", "bias_correction", "betas", "weight_decay"]


def test_auto_parameters_are_left_to_the_class_with_one_line_each() -> None:
    parsed = read({"optimizer": {"type": "Adam", "params": {"eps": "auto", "betas": "auto"}}})
    assert parsed.root.optimizer is not None and parsed.root.optimizer.params == {}
    assert (
        parsed.notices
        == parsed.warnings
        == [
            'optimizer.params.eps: "auto" became 1e-08',
            'optimizer.params.betas: "auto" became [0.9, 0.999]',
        ]
    )


@pytest.mark.parametrize("name", [*optimizers.OWN_OPTIMIZERS, *optimizers.TORCH_OPTIMIZERS])
def test_a_learning_rate_that_nothing_has_filled_in_is_refused(name: str) -> None:
    """Whoever passes an optimizer to initialize does not need it, so it is refused where the optimizer is built."""
    parsed = read({"optimizer": {"type": name, "params": {"lr": "auto"}}})
    assert parsed.warnings == [
        'optimizer.params.lr: "auto" is left in it. Give a number, unless initialize gets an optimizer'
    ]
    assert parsed.root.optimizer is not None
    with pytest.raises(DeepSpeedConfigError, match='params.lr: expected a number, found "auto"'):
        build_optimizer(name, parsed.root.optimizer.params, [torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize(("name", "key"), [("WarmupDecayLR", "warmup_max_lr"), ("LRRangeTest", "lr_range_test_min_lr")])
def test_a_rate_of_a_schedule_that_nothing_has_filled_in_is_refused(name: str, key: str) -> None:
    given = {key: "auto", **({"total_num_steps": 9} if name == "WarmupDecayLR" else {})}
    text = only_problem({"scheduler": {"type": name, "params": given}})
    assert text.startswith(f'scheduler.params.{key}: "auto" is left in it, and nothing fills it in')
    assert read({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}).warnings == [
        'scheduler.params.warmup_max_lr: "auto" became null (the optimizer\'s lr)'
    ]


def test_a_class_of_the_program_is_left_to_the_program() -> None:
    """SwissArmyTransformer names an optimizer of its own in the file, and passes initialize an instance."""
    params = {"lr": 1e-4, "decay": 0.9}
    section = read({"optimizer": {"type": "sat.ops.FusedEmaAdam", "params": params}}).root.optimizer
    assert section is not None and section.params == params
    with pytest.raises(DeepSpeedConfigError, match="found 'sat.ops.FusedEmaAdam', a class of a program"):
        build_optimizer(str(section.type), params, [torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize(
    ("given", "name"),
    [({"lr": -1}, "lr"), ({"betas": [0.9]}, "betas"), ({"betas": [0.9, 1.0]}, "betas"), ({"eps": "abc"}, "eps")],
)
def test_impossible_parameters(given: dict[str, Any], name: str) -> None:
    assert only_problem({"optimizer": {"type": "Adam", "params": given}}).startswith(
        f"optimizer.params.{name}: expected"
    )


def test_torch_adam_brings_torchs_arguments() -> None:
    assert params("AdamW", torch_adam=True, foreach=True, amsgrad=True)["amsgrad"] is True
    assert "foreach: unknown key" in only_problem({"optimizer": {"type": "AdamW", "params": {"foreach": True}}})
    assert "bias_correction: unknown key" in only_problem(
        {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "bias_correction": True}}}
    )
    for name in ("Adam", "Adagrad", "Lamb"):
        text = only_problem({"optimizer": {"type": name, "params": {"amsgrad": True}}})
        assert text.startswith("optimizer.params.amsgrad: ")


def test_max_grad_norm_becomes_clipping() -> None:
    parsed = read({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.5}}})
    assert parsed.root.gradient_clipping == 0.5 and len(parsed.notices) == 1
    assert "together with gradient_clipping" in only_problem(
        {"gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.5}}}
    )


def test_missing_parameters_of_a_schedule() -> None:
    text = only_problem({"scheduler": {"type": "WarmupDecayLR", "params": {}}})
    assert text == "scheduler.params.total_num_steps: is required here and is missing"
    text = only_problem({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})
    assert text.startswith('scheduler.params.total_num_steps: "auto" is left in it')
    assert len(problems({"scheduler": {"type": "OneCycle"}})) == 2


def test_rates_per_group() -> None:
    given = {"warmup_max_lr": [1e-3, "2e-3"], "warmup_min_lr": 0}
    section = read({"scheduler": {"type": "WarmupLR", "params": given}}).root.scheduler
    assert section is not None and section.params == {"warmup_min_lr": 0.0, "warmup_max_lr": [1e-3, 2e-3]}
    assert "warmup_max_lr: expected" in only_problem(
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, -1]}}}
    )


def test_no_warm_up_as_the_integrations_write_it() -> None:
    parsed = read({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}})
    assert parsed.root.scheduler is not None and parsed.root.scheduler.params == {"warmup_num_steps": 1}
    assert len(parsed.notices) == 1


def test_a_run_shorter_than_its_rise_gets_a_line() -> None:
    given = {"total_num_steps": 10, "warmup_num_steps": 20}
    assert "end before the rise" in read({"scheduler": {"type": "WarmupCosineLR", "params": given}}).notices[0]


def test_parameters_without_a_name() -> None:
    assert "name the optimizer" in only_problem({"optimizer": {"params": {"lr": 1}}})
    assert "name the schedule" in only_problem({"scheduler": {"params": {"lr": 1}}})
    assert read({"optimizer": {"type": None}}).root.optimizer is not None


def test_parameters_that_are_given_are_taken_by_our_classes() -> None:
    """What a table declares, the class behind the name takes (offload's own parameter aside)."""
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import FusedLion

    flags = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
    for model, kind in (
        (optimizers.AdamParams, FusedAdam),
        (optimizers.LionParams, FusedLion),
        (optimizers.LambParams, FusedLamb),
    ):
        taken = arguments(kind, "params", "model_params")
        for name in set(spellings(model)) - flags:
            assert default_of(model.model_fields[name]) == as_declared(taken[name])
