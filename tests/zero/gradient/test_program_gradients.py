"""What a program does with gradients counts: reads and writes, gradients that no hook announced."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.errors import CallOrderError, DivergenceError
from deepspeed.utils import safe_get_full_grad
from tests.engine.support import SHARDED, WIDTH, engine_of, inputs, rank
from tests.harness import on_ranks, run_ranks
from tests.harness.errors import RanksFailed
from tests.harness.logged import logged
from tests.zero.reading import full_masters, full_params

# What a program does to gradients by torch's calls between backwards is done as in plain torch, or refused there.


class Net(nn.Module):
    """Two layers that are always used, and one that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.last.bias.dtype)
        return self.last(torch.tanh(self.first(x))).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay and momentum show the difference between no gradient and a gradient of zeros."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


@dataclass
class Program:
    """A training program around plain torch or an engine.

    Attributes:
        model: The model whose gradients the calls change.
        optimizer: The torch optimizer that the program has made.
        memory: What calls keep between them.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def grads(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        return [(p, p.grad) for n, p in self.model.named_parameters() if not n.startswith("unused")]  # type: ignore[misc]


def _each(change: Callable[[nn.Parameter, torch.Tensor], Any]) -> Callable[[Program], None]:
    def act(program: Program) -> None:
        with torch.no_grad():
            for parameter, grad in program.grads:
                change(parameter, grad)

    return act


def _assign(value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Program], None]:
    def change(parameter: nn.Parameter, grad: torch.Tensor) -> None:
        parameter.grad = value(grad)

    return _each(change)


def _forget(parameter: nn.Parameter, _grad: torch.Tensor) -> None:
    parameter.grad = None


def _ramp(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-0.2, 0.3, like.numel()).view(like.shape)


def _double_in_place(program: Program) -> None:
    for parameter, _ in program.grads:
        parameter.grad *= 2.0  # type: ignore[operator]


def _project(program: Program) -> None:
    """Removes from each gradient its component along the gradient of the call before, as PCGrad does."""
    now = [grad.clone() for _, grad in program.grads]
    before = program.memory.get("before")
    if before is not None:
        along = sum((a * b).sum() for a, b in zip(now, before, strict=True))
        square = sum((b * b).sum() for b in before)
        for (parameter, _), a, b in zip(program.grads, now, before, strict=True):
            parameter.grad = a - along / square * b
    program.memory["before"] = now


EVERYWHERE: dict[str, Callable[[Program], Any]] = {
    "module.zero_grad": lambda program: program.model.zero_grad(),
    "submodule.zero_grad": lambda program: program.model.last.zero_grad(),
    "module.zero_grad to zeros": lambda program: program.model.zero_grad(set_to_none=False),
    "optimizer.zero_grad": lambda program: program.optimizer.zero_grad(),
    "grad = None": _each(_forget),
    "weight.grad = None": lambda program: setattr(program.model.last.weight, "grad", None),
    "grad.zero_": _each(lambda _, grad: grad.zero_()),
    "grad.data.zero_": _each(lambda _, grad: grad.data.zero_()),
    "grad.detach().zero_": _each(lambda _, grad: grad.detach().zero_()),
    "grad.mul_": _each(lambda _, grad: grad.mul_(-1.5)),
    "grad.mul_ by a tensor": _each(lambda _, grad: grad.mul_(torch.tensor(0.5))),
    "grad.div_": _each(lambda _, grad: grad.div_(3)),
    "grad *=": _double_in_place,
    "grad.add_": _each(lambda _, grad: grad.add_(_ramp(grad), alpha=2)),
    "grad = grad + noise": _assign(lambda grad: grad + _ramp(grad)),
}
WITH_VALUES: dict[str, Callable[[Program], Any]] = {
    "clip_grad_norm_": lambda program: nn.utils.clip_grad_norm_(program.model.parameters(), 0.05),
    "clip_grad_norm_ one by one": lambda program: nn.utils.clip_grad_norm_(
        program.model.parameters(), 0.05, foreach=False
    ),
    "clip_grad_value_": lambda program: nn.utils.clip_grad_value_(program.model.parameters(), 0.01),
    "grad = 2 * grad": _assign(lambda grad: 2 * grad),
    "grad.copy_": _each(lambda _, grad: grad.copy_(grad.sign() * 0.1)),
    "grad[0] = 0": _each(lambda _, grad: grad.__setitem__(0, 0.0)),
    "grad.view": _each(lambda _, grad: grad.view(-1)[1:].mul_(0.0)),
    "grad.clamp_": _each(lambda _, grad: grad.data.clamp_(-0.01, 0.01)),
    "projection": _project,
    "kept": lambda program: program.memory.setdefault("kept", [grad.clone() for _, grad in program.grads]),
}
CALLS = {**EVERYWHERE, **WITH_VALUES}


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        call: Key of ``CALLS``.
        stage: ZeRO stage.
        when: "between" two backwards of one micro-batch, "micro" between two micro-batches, or before the "step".
        more: Further configuration.
    """

    call: str
    stage: int
    when: str
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def accumulation(self) -> int:
        return 2 if self.when == "micro" else 1

    def has_values(self, world: int) -> bool:
        """Whether a rank has the whole reduced gradient where the call is made."""
        return self.more != FP16 and (world == 1 or (self.stage == 0 and self.when != "micro"))


def _run(cell: Cell, program: Program, backward: Callable[[int, int], None], step: Callable[[], None]) -> None:
    for number in range(3):
        for part in range(2):
            backward(number, part)
            if (cell.when == "step") == (part == 1):
                CALLS[cell.call](program)
            if part == 1 or cell.accumulation == 2:
                step()


def _reference(cell: Cell, world: int) -> dict[str, torch.Tensor]:
    model = Net()
    program = Program(model, sgd(model))
    steps = 0

    def backward(number: int, part: int) -> None:
        for one in range(world):
            (model(inputs(number, part, one)) / world / cell.accumulation).backward()

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps % cell.accumulation == 0:
            program.optimizer.step()
            nn.Module.zero_grad(model)

    _run(cell, program, backward, step)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _trained(cell: Cell) -> dict[str, torch.Tensor]:
    model = Net()
    made: list[torch.optim.Optimizer] = []

    def build(of: nn.Module) -> torch.optim.Optimizer:
        made.append(sgd(of))
        return made[0]

    config: dict[str, Any] = dict(cell.more)
    zero = {**(SHARDED if cell.stage == 3 else {}), **config.pop("zero", {})}
    engine = engine_of(model, cell.stage, optimizer=build, accumulation=cell.accumulation, zero=zero, **config)

    def backward(number: int, part: int) -> None:
        engine.backward(engine(inputs(number, part, rank())))

    _run(cell, Program(model, made[0]), backward, engine.step)
    found = full_params(engine)
    assert all(parameter.grad is None for parameter in model.parameters())
    engine.destroy()
    return found


def _compare(cells: list[Cell]) -> None:
    world = dist.get_world_size()
    for cell in cells:
        if cell.call in WITH_VALUES and not cell.has_values(world):
            with pytest.raises(CallOrderError, match=r"needs values.*gradient_clipping.*safe_get_full_grad"):
                _trained(cell)
            continue
        expected, found = _reference(cell, world), _trained(cell)
        for name, value in expected.items():
            _check(f"{cell} {name}", found[name].float(), value, **_tolerance(cell))


def _check(name: str, found: torch.Tensor, expected: torch.Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(found, expected, msg=lambda text: f"{name}: {text}", **tolerance)


def _cells(whens: tuple[str, ...]) -> list[Cell]:
    return [Cell(call, stage, when) for call in CALLS for stage in range(4) for when in whens]


@pytest.mark.parametrize("when", ["between", "micro", "step"])
def test_one_rank(when: str) -> None:
    run_ranks(_compare, 1, _cells((when,)))


@pytest.mark.parametrize("when", ["between", "micro", "step"])
def test_two_ranks(when: str) -> None:
    run_ranks(_compare, 2, _cells((when,)))


def _tolerance(cell: Cell) -> dict[str, float]:
    is_narrow = cell.more in (BF16, FP16)
    return {"rtol": 0.05, "atol": 0.02} if is_narrow else {"rtol": 1e-4, "atol": 1e-6}


BF16: tuple[tuple[str, Any], ...] = (("bf16", {"enabled": True}),)
FP16: tuple[tuple[str, Any], ...] = (("fp16", {"enabled": True, "loss_scale": 64.0}),)
OFFLOAD: tuple[tuple[str, Any], ...] = (("zero", {"offload_optimizer": {"device": "cpu"}}),)


def test_precisions_and_offload() -> None:
    run_ranks(
        _compare,
        2,
        [
            Cell(call, stage, when, more)
            for more in (BF16, FP16, OFFLOAD)
            for stage in ((0, 2, 3) if more is not OFFLOAD else (2, 3))
            for call, when in (
                ("submodule.zero_grad", "between"),
                ("weight.grad = None", "micro"),
                ("grad.mul_", "step"),
                ("grad.zero_", "step"),
                ("grad.add_", "between"),
                ("clip_grad_norm_", "step"),
            )
            if more is not FP16 or call != "grad.add_"  # refused: it has no loss scale
        ],
    )


@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks(world: int) -> None:
    run_ranks(
        _compare,
        world,
        [
            Cell(call, stage, when)
            for stage in range(4)
            for call, when in (
                ("submodule.zero_grad", "micro"),
                ("weight.grad = None", "between"),
                ("grad = grad + noise", "step"),
            )
        ],
    )


class _Penalized:
    """Backwards of the program's own, one of them through parameters alone, which reaches no output of the model."""

    def __init__(self, graph: bool) -> None:
        self.graph = graph

    def run(self, model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], ranks: range) -> None:
        for one in ranks:
            (forward(inputs(0, one)) / len(ranks)).backward()
        model.last.weight.grad = None  # type: ignore[union-attr]
        for _ in ranks[:1]:
            penalty = model.last.weight.square().sum() + 2 * model.first.weight.square().sum()  # type: ignore[operator, union-attr]
            penalty.backward(create_graph=self.graph)
            model.first.bias.grad.mul_(2)  # type: ignore[union-attr, operator]
        for one in ranks:
            (forward(inputs(1, one)) / len(ranks)).backward()


@on_ranks(2)
def test_backward_through_parameters_alone() -> None:
    stages = [0, 1, 2]
    world = dist.get_world_size()
    for graph in (False, True):
        model = Net()
        optimizer = sgd(model)
        program = _Penalized(graph)
        for _ in range(2):
            program.run(model, model, range(world))
            optimizer.step()
            optimizer.zero_grad()
        for stage in stages:
            trained = Net()
            engine = engine_of(trained, stage, optimizer=sgd)
            for _ in range(2):
                program.run(trained, engine, range(rank(), rank() + 1))
                engine.step()
            for name, value in full_params(engine).items():
                wanted = model.get_parameter(name).detach()
                _check(f"{stage} {graph} {name}", value, wanted)
            engine.destroy()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_what_is_refused(stage: int) -> None:
    model = Net()
    made: list[torch.optim.Optimizer] = []
    engine = engine_of(model, stage, optimizer=lambda of: made.append(sgd(of)) or made[0])
    x = inputs(0, rank())
    engine.backward(engine(x))
    kept, weight = model.last.weight.grad, model.last.weight
    assert kept is weight.grad and "last.weight" in repr(kept) and kept.shape == (3, WIDTH)
    assert torch.zeros_like(kept).shape == kept.shape
    with pytest.raises(CallOrderError, match="param_groups"):
        nn.utils.clip_grad_norm_(made[0].param_groups[0]["params"], 1.0)
    with pytest.raises(CallOrderError, match="param_groups"):
        made[0].step()
    for give in (made[0], engine.optimizer):
        scaler = torch.amp.GradScaler(engine.device.type)
        scaler.scale(x.sum())
        for call in (scaler.unscale_, scaler.step):
            with pytest.raises(CallOrderError, match=r"GradScaler in optimizer.param_groups.*fp16.enabled"):
                call(give)
    with pytest.raises(CallOrderError, match="initialize"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    engine.backward(engine(x))
    with pytest.raises(CallOrderError, match="discarded"):
        kept.mul_(2)
    weight.grad = weight.grad.detach()
    engine.step()
    with pytest.raises(CallOrderError, match="discarded"):
        kept.norm()
    engine.backward(engine(x))
    found = safe_get_full_grad(weight)
    assert found is not None and bool(found.any())
    model.last.zero_grad()
    assert safe_get_full_grad(weight) is None and safe_get_full_grad(model.first.weight) is not None
    engine.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(run.grad is None for group in made[0].param_groups for run in group["params"])


@on_ranks(2)
def test_a_call_on_some_ranks_only() -> None:
    stages = [0, 1, 2, 3]
    for stage in stages:
        model = Net()
        engine = engine_of(model, stage, optimizer=sgd)
        engine.backward(engine(inputs(0, rank())))
        if rank() == 0:
            model.last.zero_grad()
        with pytest.raises(DivergenceError, match="set, changed or discarded"):
            engine.step()
        engine.destroy()


@on_ranks(2)
def test_losses_with_a_count() -> None:
    stage = 2
    model, plain = Net(), Net()
    engine, optimizer = engine_of(model, stage, optimizer=sgd), sgd(plain)
    engine.backward(engine(inputs(0)) * 5, count=5)
    model.zero_grad()
    engine.backward(engine(inputs(1)) * 3, count=3)
    engine.step()
    plain(inputs(1)).backward()
    optimizer.step()
    for name, value in full_params(engine).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach())
    engine.backward(engine(inputs(0)) * 5, count=5)
    model.last.zero_grad()
    with pytest.raises(CallOrderError, match="count"):
        engine.backward(engine(inputs(0)) * 5, count=5)


def _hooked(kind: str, accumulation: int, stage: int) -> None:
    model, plain = Net(), Net()
    engine = engine_of(model, stage, optimizer=sgd, accumulation=accumulation)
    optimizer = sgd(plain)
    seen: list[float] = []

    def change(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen.append(float(parameter.grad.abs().sum()))
        if kind == "changing":
            parameter.grad.mul_(-3)
        if kind == "replacing":
            parameter.grad = parameter.grad * -3
        if kind == "dropping":
            parameter.grad = None

    for one in (model, plain):
        for parameter in (one.last.weight, one.last.bias, one.first.weight):
            if kind == "tensor hook":
                parameter.register_hook(lambda grad: grad * -3)
            else:
                parameter.register_post_accumulate_grad_hook(change)
    for number in range(3):
        for part in range(accumulation):
            (plain(inputs(number, part)) / accumulation).backward()
            engine.backward(engine(inputs(number, part)))
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == (0 if kind == "tensor hook" else 2 * 3 * 3 * accumulation)
    for name, value in full_params(engine).items():
        _check(name, value, plain.get_parameter(name).detach())


@pytest.mark.parametrize("stage", range(4))
def test_hooks(stage: int) -> None:
    for kind in ("changing", "replacing", "dropping", "reading", "tensor hook"):
        run_ranks(_hooked, 2, kind, 1, stage)
    run_ranks(_hooked, 2, "reading", 2, stage)
    run_ranks(_hooked, 2, "tensor hook", 2, stage)
    with pytest.raises(RanksFailed, match="register_hook to change each gradient"):
        run_ranks(_hooked, 2, "changing", 2, stage)


def _sharpness_aware(model: nn.Module, backward: Callable[[], None], step: Callable[[], None]) -> None:
    """Two steps as SAM makes them: one to the worst point nearby and back, one by the gradient found there."""
    parameters = [parameter for name, parameter in model.named_parameters() if not name.startswith("unused")]
    for _ in range(2):
        backward()
        with torch.no_grad():
            norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()  # type: ignore[union-attr]
            moves = [0.05 * parameter.grad / norm for parameter in parameters]  # type: ignore[operator]
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.add_(move)
        model.zero_grad()
        backward()
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.sub_(move)
        step()


def _sam(stage: int) -> None:
    model, plain = Net(), Net()
    engine, optimizer = engine_of(model, stage, optimizer=sgd), sgd(plain)
    _sharpness_aware(model, lambda: engine.backward(engine(inputs(0))), engine.step)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    _sharpness_aware(plain, lambda: plain(inputs(0)).backward(), step)
    for name, value in full_params(engine).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)


def test_sharpness_aware_minimization() -> None:
    run_ranks(_sam, 2, 0)
    for stage in range(4):
        run_ranks(_sam, 1, stage)


def _logged(accumulation: int, early: bool) -> list[str]:
    model = Net()
    with logged(logging.WARNING) as texts:
        engine = engine_of(model, 1, optimizer=sgd, accumulation=accumulation)
        for number in range(4):
            if early or number % accumulation == 0:
                model.zero_grad()
            engine.backward(engine(inputs(number)))
            engine.step()
    return texts


def test_the_usual_places_say_nothing() -> None:
    assert run_ranks(_logged, 1, 1, True) == [[]] and run_ranks(_logged, 1, 2, False) == [[]]
    assert "gradient_accumulation_steps=2" in run_ranks(_logged, 1, 2, True)[0][0]


# A ``.grad`` that no hook announced counts: zero-bubble schedules compute weights' gradients by ``autograd.grad``.


class _ByHand(torch.autograd.Function):
    """``x * weight`` whose backward hands the weight its gradient itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, owner: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner = owner
        return x * weight

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.owner.weight.grad = (outputs[0] * x).sum(0)
        return outputs[0] * weight, None, None


class Scale(nn.Module):
    """One weight; its gradient comes from autograd or by hand."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.by_hand = by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ByHand.apply(x, self.weight.detach(), self) if self.by_hand else x * self.weight


class Model(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.scale, self.last = nn.Linear(WIDTH, WIDTH), Scale(by_hand), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.scale(torch.tanh(self.first(x)))).square().mean()


def _trained_unannounced_gradients(stage: int, how: str, accumulation: int) -> dict[str, torch.Tensor]:
    zero = SHARDED if stage == 3 else {}
    engine = engine_of(Model(how == "in backward"), stage, zero=zero, accumulation=accumulation)
    for step in range(3):
        for micro in range(accumulation):
            loss = engine(inputs(step, micro, dist.get_rank()))
            if how == "afterwards":
                params = list(engine.module.parameters())
                found = torch.autograd.grad(loss / accumulation, params)
                for parameter, gradient in zip(params, found, strict=True):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            else:
                engine.backward(loss)
            engine.step()
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    return full_masters(engine)


def _agree(cells: list[tuple[int, str, int]]) -> None:
    for stage, how, accumulation in cells:
        expected = _trained_unannounced_gradients(stage, "announced", accumulation)
        found = _trained_unannounced_gradients(stage, how, accumulation)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, msg=lambda text: f"{stage}, {how}, {name}: {text}")  # noqa: B023


CELLS = [
    (0, "in backward", 2),
    (2, "in backward", 2),
    (3, "in backward", 1),
    (1, "afterwards", 2),
    (2, "afterwards", 1),
]


def test_gradients_that_no_hook_announced_count() -> None:
    run_ranks(_agree, 2, CELLS)


def test_on_one_rank() -> None:
    run_ranks(_agree, 1, [(0, "in backward", 2), (2, "afterwards", 2)])
