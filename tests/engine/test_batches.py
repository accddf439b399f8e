"""Which micro-batches make an update, and when their gradients are reduced."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad

from deepspeed.comm.base.counters import counted
from deepspeed.errors import CallOrderError, NotYetSupportedError
from deepspeed.zero import MicroBatch
from tests.engine.support import adamw, engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import Layer, tower
from tests.zero.reading import full_masters

# When a micro-step ends in an update: accumulation, the override, the optimizer's own step, zero_grad.


def _reference(micro_batches, ranks, divide_by):
    """Weights after one AdamW step per list of micro-batches; gradients added over them, averaged over ranks."""
    model = tower()
    optimizer = adamw(model)
    for step in micro_batches:
        optimizer.zero_grad()
        for position in step:
            for r in range(ranks):
                (model(inputs(*position, r)) / divide_by / ranks).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _assert_close(engine, expected):
    assert_states_equal(full_masters(engine), expected, rtol=2e-5, atol=1e-6)


def _accumulate(stage):
    engine = engine_of(tower(), stage, accumulation=3)
    boundaries = []
    for step in range(2):
        for micro in range(3):
            loss = engine(inputs(step, micro, rank()))
            returned = engine.backward(loss)
            torch.testing.assert_close(returned, loss / 3)
            boundaries.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            assert engine.was_step_applied() is boundaries[-1]
    assert boundaries == [False, False, True] * 2
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (2, 6, 0)
    assert engine.global_samples == 2 * 2 * 3 * 2
    _assert_close(engine, _reference([[(0, m) for m in range(3)], [(1, m) for m in range(3)]], 2, 3))


def _override(stage):
    """The caller decides; the accumulation steps of the configuration only divide."""
    engine = engine_of(tower(), stage, accumulation=2)
    for step in range(2):
        for micro in range(3):
            engine.set_gradient_accumulation_boundary(micro == 2)
            engine.backward(engine(inputs(step, micro, rank())))
            engine.step()
    assert engine.global_steps == 2
    _assert_close(engine, _reference([[(0, m) for m in range(3)], [(1, m) for m in range(3)]], 2, 2))


def _boundary_after_backward(stage):
    """The boundary is declared only after the backward: what was kept locally is reduced at the step."""
    engine = engine_of(tower(), stage, accumulation=1)
    for step in range(2):
        for micro in range(2):
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(engine(inputs(step, micro, rank())))
            engine.set_gradient_accumulation_boundary(micro == 1)
            engine.step()
    _assert_close(engine, _reference([[(0, 0), (0, 1)], [(1, 0), (1, 1)]], 2, 1))


def _undivided(stage):
    engine = engine_of(tower(), stage, accumulation=2)
    for micro in range(2):
        engine.backward(engine(inputs(0, micro, rank())), scale_wrt_gas=False)
        engine.step()
    _assert_close(engine, _reference([[(0, 0), (0, 1)]], 2, 1))


def _own_step(stage):
    """As Lightning Fabric drives it: engine.backward, then the returned optimizer's own step."""
    engine = engine_of(tower(), stage, gradient_clipping=1e9)
    for step in range(3):
        engine.backward(engine(inputs(step, rank())))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert engine.optimizer.overflow is False
    _assert_close(engine, _reference([[(s,)] for s in range(3)], 2, 1))


def _zero_grad(stage):
    """Whatever was accumulated before zero_grad does not count."""
    engine = engine_of(tower(), stage, accumulation=2)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(inputs(5, rank())))
    engine.step()
    engine.zero_grad()
    for micro in range(2):
        engine.set_gradient_accumulation_boundary(micro == 1)
        engine.backward(engine(inputs(0, micro, rank())))
        engine.step()
    _assert_close(engine, _reference([[(0, 0), (0, 1)]], 2, 2))


def _unmanaged(stage):
    """managed_gradient_accumulation false: every call of step is an update, whatever the accumulation steps say."""
    engine = engine_of(tower(), stage, accumulation=2, managed_gradient_accumulation=False)
    for step in range(2):
        for micro in range(2):
            engine.backward(engine(inputs(step, micro, rank())))
        engine.step()
    assert engine.global_steps == 2
    _assert_close(engine, _reference([[(0, 0), (0, 1)], [(1, 0), (1, 1)]], 2, 2))


def _changed_batch(stage):
    engine = engine_of(tower(), stage)
    engine.set_train_batch_size(8)
    assert engine.gradient_accumulation_steps() == 2
    assert engine.get_batch_info() == (8, 2, 2)
    for micro in range(2):
        engine.backward(engine(inputs(0, micro, rank())))
        engine.step()
    assert engine.global_steps == 1
    _assert_close(engine, _reference([[(0, 0), (0, 1)]], 2, 2))


def _closure(stage):
    engine = engine_of(tower(), stage)

    def closure():
        loss = engine(inputs(0, rank()))
        engine.backward(loss)
        return loss

    assert engine.optimizer.step(closure).shape == ()
    _assert_close(engine, _reference([[(0,)]], 2, 1))


BODIES = [
    _accumulate,
    _override,
    _boundary_after_backward,
    _undivided,
    _own_step,
    _zero_grad,
    _unmanaged,
    _changed_batch,
    _closure,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
@on_ranks(2)
def test_at_every_stage(body):
    for stage in range(4):
        body(stage)


@on_ranks(2)
def test_misuse_is_named_and_harmless():
    engine = engine_of(tower(), 3)
    with pytest.raises(CallOrderError, match="shape"):
        engine.backward(engine(inputs(0)).reshape(1) * torch.ones(3))
    with pytest.raises(CallOrderError, match="no_sync"), engine.no_sync():
        engine.step()
    engine.backward(engine(inputs(0)))
    engine.step()
    assert engine.global_steps == 1


# no_sync at every stage: nothing travels inside, and the result is that of reducing each micro-batch.


def _train(stage, inside, accumulation=3, **config):
    engine = engine_of(tower(), stage, accumulation=accumulation, **config)
    silent = []
    for step in range(2):
        for micro in range(accumulation):
            loss = engine(inputs(step, micro, rank()))
            if inside and micro < accumulation - 1:
                with counted() as traffic, engine.no_sync():
                    engine.backward(loss)
                silent.append(sum(t.nbytes for name, t in traffic.requested.items() if "reduce" in name))
            else:
                engine.backward(loss)
            engine.step()
    return full_masters(engine), silent


def _compare(stage):
    plain, _ = _train(stage, False)
    quiet, silent = _train(stage, True)
    assert len(silent) == 4 and not any(silent), silent
    exact = stage < 2  # stages 0 and 1 add up micro-batches before ranks anyway
    assert_states_equal(quiet, plain, rtol=0 if exact else 2e-5, atol=0 if exact else 1e-6)
    return quiet


@on_ranks(2)
def test_equal_to_reducing_each_micro_batch_and_the_same_bits_at_every_stage():
    results = [_compare(stage) for stage in range(4)]
    for other in results[1:]:
        assert_states_equal(other, results[0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_the_step_reduces_what_no_backward_did(stage):
    """Even the boundary's backward may be inside: the step reduces what is left."""
    plain, _ = _train(stage, False, accumulation=1)
    engine = engine_of(tower(), stage)
    for step in range(2):
        loss = engine(inputs(step, 0, rank()))
        with engine.no_sync():
            engine.backward(loss)
        engine.step()
    assert_states_equal(full_masters(engine), plain)


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_reduction_by_hand(stage):
    engine = engine_of(tower(), stage)
    engine.enable_backward_allreduce = False
    plain, _ = _train(stage, False, accumulation=1)
    for step in range(2):
        engine.backward(engine(inputs(step, 0, rank())))
        engine.allreduce_gradients()
        engine.step()
    assert_states_equal(full_masters(engine), plain)


@on_ranks(2)
def test_gradients_from_inside_count_where_the_last_backward_has_none():
    """A parameter that has a gradient only inside no_sync is updated as well."""
    engine = engine_of(tower(), 2, accumulation=2)
    for micro in range(2):
        x = inputs(0, micro, rank())
        if micro == 0:
            with engine.no_sync():
                engine.backward(engine(x))
        else:
            engine.backward(engine.module.last(x).square().mean())
        engine.step()
    weights = full_masters(engine)
    moved = {name: not torch.equal(weights[name], p) for name, p in tower().named_parameters()}
    assert all(moved.values()), moved


@on_ranks(2)
def test_nesting_is_refused():
    engine = engine_of(tower(), 1)
    with engine.no_sync(), pytest.raises(CallOrderError, match="nest"), engine.no_sync():
        raise AssertionError("not reached")


# Several backwards before one update, reduced once; and torch.func through the engine. Compared with plain torch.


STEPS = 2


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _losses(kind, forward, step, of):
    """Functions that each compute a loss to backpropagate, in order."""
    x, y = inputs(step, 0, of), inputs(step, 1, of)
    if kind == "distillation":  # one forward, two backwards through it, and another forward
        hidden = forward(x)
        return [lambda: (hidden.square(), True), lambda: (2 * hidden, False), lambda: (forward(y), False)]
    # Cached contrastive chunks: as many backwards as forwards.
    return [lambda i=i: (forward(inputs(step, i, of)), False) for i in range(3)]


def _plain(kind, accumulation=1):
    model = tower()
    optimizer = _sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for of in range(dist.get_world_size()):
            for micro in range(accumulation):
                for loss in _losses(kind, model, step + 10 * micro, of):
                    value, keep = loss()
                    (value / dist.get_world_size() / accumulation).backward(retain_graph=keep)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _train_one_reduction(kind, stage, accumulation=1, outside=False, **config):
    engine = engine_of(tower(), stage, optimizer=_sgd, accumulation=accumulation, **config)
    for step in range(STEPS):
        for micro in range(accumulation):
            losses = _losses(kind, engine, step + 10 * micro, rank())
            last = losses.pop() if outside else None
            with counted() as traffic, engine.coalesce_grad_reduction():
                for loss in losses:
                    value, keep = loss()
                    engine.backward(value, retain_graph=keep)
                assert not any(t.nbytes for name, t in traffic.requested.items() if "reduce" in name)
            if last is not None:
                engine.backward(last()[0])
            engine.step()
    return full_masters(engine)


CASES = {
    0: [("distillation", 1, False), ("chunks", 1, False)],
    1: [("distillation", 1, False), ("chunks", 2, False)],
    2: [("distillation", 1, True), ("chunks", 2, False)],
    3: [("distillation", 1, False), ("chunks", 1, True)],
}


@on_ranks(2)
def test_backwards_in_a_block_are_reduced_once_and_equal_plain_torch():
    for stage, cases in CASES.items():
        for kind, accumulation, outside in cases:
            found = _train_one_reduction(kind, stage, accumulation, outside)
            assert_states_equal(found, _plain(kind, accumulation), rtol=1e-5, atol=1e-6)


def _gan(stage):
    """Two engines; the generator's loss leaves gradients in the other one, which are dropped."""
    torch.manual_seed(5)
    parts = nn.Linear(4, 6), nn.Linear(6, 1)
    plain = copy.deepcopy(parts)
    maker, judge = (engine_of(part, stage, optimizer=_sgd) for part in parts)
    optimizers = [_sgd(part) for part in plain]
    for step in range(STEPS):
        noise = [inputs(step, 7, of)[:, :4] for of in range(2)]
        real = [inputs(step, 8, of)[:, :6] for of in range(2)]
        with judge.coalesce_grad_reduction():
            judge.backward(-judge(real[rank()]).mean())
            judge.backward(judge(maker(noise[rank()]).detach()).mean())
        judge.step()
        loss = -judge(maker(noise[rank()])).mean()
        maker.backward(loss)
        maker.step()
        judge.zero_grad()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for of in range(2):
            ((plain[1](plain[0](noise[of]).detach()).mean() - plain[1](real[of]).mean()) / 2).backward()
        optimizers[1].step()
        for of in range(2):
            (-plain[1](plain[0](noise[of])).mean() / 2).backward()
        optimizers[0].step()
    for engine, part in zip((maker, judge), plain, strict=True):
        assert_states_equal(full_masters(engine), dict(part.named_parameters()), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_gan_of_two_engines():
    for stage in range(4):
        _gan(stage)


@on_ranks(2)
def test_misuse_is_named():
    engine = engine_of(tower(), 2)
    with engine.coalesce_grad_reduction():
        engine.backward(engine(inputs(0, 0, rank())))
        with pytest.raises(CallOrderError, match="inside no_sync or coalesce_grad_reduction"):
            engine.step()
        with pytest.raises(CallOrderError, match="nest"), engine.no_sync():
            raise AssertionError("not reached")
    engine.step()
    assert engine.global_steps == 1


def _transforms(stage):
    func = torch.func
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    engine = engine_of(model, stage, optimizer=_sgd)
    x = torch.randn(2, 4)
    cases = {
        "grad_and_value": lambda f: func.grad_and_value(lambda a: f(a).sum())(x)[0],
        "jacrev": lambda f: func.jacrev(f)(x),
        "jvp": lambda f: func.jvp(f, (x,), (torch.ones_like(x),))[1],
        "hessian": lambda f: func.hessian(lambda a: f(a).sum())(x),
        "vmap of grad": lambda f: func.vmap(func.grad(lambda a: f(a).sum()))(x),
        "linearize": lambda f: func.linearize(f, x)[1](torch.ones_like(x)),
    }
    for name, case in cases.items():
        if stage == 3:
            with pytest.raises(NotYetSupportedError, match="torch.func"):
                case(engine)
        else:
            torch.testing.assert_close(case(engine), case(plain), msg=name)

    def tangent(f):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent.detach()

    by_autograd = {
        "forward_ad": tangent,
        "hvp": lambda f: torch.autograd.functional.hvp(lambda a: f(a).sum(), x, torch.ones_like(x))[1],
        "jacobian": lambda f: torch.autograd.functional.jacobian(f, x, vectorize=True),
    }
    for name, case in by_autograd.items():
        torch.testing.assert_close(case(engine), case(plain), msg=name)

    # A penalty on the gradient: what the transform returns is backpropagated.
    def penalty(model):
        loss = model(x).square().mean()
        return loss if stage == 3 else loss + func.grad(lambda a: model(a).sum())(x).square().mean()

    engine.backward(penalty(engine))
    engine.step()
    optimizer = _sgd(plain)
    penalty(plain).backward()
    optimizer.step()
    assert_states_equal(full_masters(engine), dict(plain.named_parameters()), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_function_transforms_through_the_engine():
    for stage in range(4):
        _transforms(stage)


@on_ranks(2)
def test_modules_are_recorded_as_graphs_or_refused_in_a_sentence():
    """Modules as graphs: as before below stage 3; there a sentence, and a plain copy with the exported weights."""
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(2, 4)
    ways = {
        "export": lambda module: torch.export.export(module, (x,)).module(),
        "strict export": lambda module: torch.export.export(module, (x,), strict=True).module(),
        "trace": lambda module: torch.jit.trace(module, (x,)),
        "script": torch.jit.script,
    }
    for stage in (2, 3):
        engine = engine_of(copy.deepcopy(plain), stage, optimizer=_sgd)
        for name, record in ways.items():
            if stage < 3:
                torch.testing.assert_close(record(engine.module)(x), engine(x), msg=name)
                continue
            with pytest.raises(Exception, match=r"plain copy of the model that has loaded .* engine.export_weights"):
                record(engine.module)
            engine.backward(engine(x).sum())  # nothing is left of the attempt
            engine.step()
        weights = dict(engine.export_weights())
        if dist.get_rank() == 0:
            plain.load_state_dict(weights)
        with torch.no_grad():
            expected = engine(x)
            if dist.get_rank() == 0:
                torch.testing.assert_close(ways["export"](plain)(x), expected)


# Forwards and backwards in any legal order, part by part: what a schedule does gives what the plain order gives.


PARTS, MICRO_BATCHES, UPDATES = 3, 4, 3
Action = tuple[str, int, int]  # "forward" or "backward", part, micro-batch


class Chain(nn.Module):
    """Parts that are called one by one; the first and the last share a weight, and a frozen layer is among them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(Layer(), Layer()) for _ in range(PARTS))
        self.parts[2][1].rise.weight = self.parts[0][0].rise.weight
        self.parts[1][0].requires_grad_(False)


def plain() -> list[Action]:
    """One micro-batch after the other."""
    order: list[Action] = []
    for number in range(MICRO_BATCHES):
        order += [("forward", part, number) for part in range(PARTS)]
        order += [("backward", part, number) for part in reversed(range(PARTS))]
    return order


def shuffled(seed: int) -> list[Action]:
    """A random order in which every action comes after what it needs."""
    choose = random.Random(seed)
    waiting = [
        [("forward", part, number) for part in range(PARTS)]
        + [("backward", part, number) for part in reversed(range(PARTS))]
        for number in range(MICRO_BATCHES)
    ]
    order = []
    while any(waiting):
        order.append(choose.choice([actions for actions in waiting if actions]).pop(0))
    return order


def positions(order: list[Action]) -> Iterator[tuple[Action, MicroBatch | None]]:
    """The actions, and of the backwards where they stand in the update."""
    backwards = [action for action in order if action[0] == "backward"]
    for action in order:
        micro = MicroBatch(action[2], is_first=action == backwards[0], is_last=action == backwards[-1])
        yield action, micro if action[0] == "backward" else None


def run_update(engine: Any, update: int, order: list[Action]) -> None:
    """Runs the actions, each part with the inputs detached from the part before it."""
    entering: dict[tuple[int, int], torch.Tensor] = {}
    leaving: dict[tuple[int, int], torch.Tensor] = {}
    for (kind, part, number), micro in positions(order):
        if kind == "forward":
            x = inputs(update, number, rank()).double() if part == 0 else leaving[part - 1, number].detach()
            entering[part, number] = x = x.clone().requires_grad_(part > 0)
            leaving[part, number] = engine.module.parts[part](x)
        elif part == PARTS - 1:
            engine.backward(leaving.pop((part, number)).square().mean(), micro_batch=micro)
        else:
            gradient = entering.pop((part + 1, number)).grad
            engine.backward([leaving.pop((part, number))], gradients=[gradient], micro_batch=micro)
    engine.step()


def chain_engine(stage: int, **zero: Any) -> Any:
    torch.manual_seed(3)
    section = {"stage3_param_persistence_threshold": 20, **zero}
    return engine_of(Chain().double(), stage, zero=section, accumulation=MICRO_BATCHES)


NOTHING_KEPT = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


@pytest.mark.parametrize(
    ("stage", "zero"),
    [(0, {}), (1, {}), (2, {"overlap_comm": True}), (3, {}), (3, NOTHING_KEPT)],
    ids=["0", "1", "2", "3", "3-nothing-kept"],
)
@on_ranks(2)
def test_any_legal_order_gives_what_the_plain_one_gives(stage: int, zero: dict[str, Any]) -> None:
    """Other orders in every update, and one seed more than one update."""
    one_by_one = chain_engine(stage, **zero)
    engine = chain_engine(stage, **zero)
    for update in range(UPDATES):
        run_update(one_by_one, update, plain())
        run_update(engine, update, shuffled(update // 2))
        assert engine.global_steps == update + 1 and engine.was_step_applied()
    assert_states_equal(full_masters(engine), full_masters(one_by_one), rtol=1e-9, atol=1e-12)


def refused(engine: Any, micro: str, *arguments: Any, **more: Any) -> None:
    with pytest.raises(CallOrderError, match=micro):
        engine.backward(*arguments, **more)


@on_ranks(1)
def test_a_driver_that_announces_something_else_raises() -> None:
    engine = engine_of(tower(), 2, accumulation=2)
    first, last = MicroBatch(0, is_first=True, is_last=False), MicroBatch(1, is_first=False, is_last=True)
    loss, one = engine(inputs(0)), torch.ones(())
    refused(
        engine, r"expected a gradient \(or None\) for each of 2 tensor\(s\), found 1", [loss, loss], gradients=[one]
    )
    refused(engine, r"tensor 0 has shape \(\), its gradient \(3,\)", loss, gradients=torch.ones(3))
    refused(engine, "no tensor requires a gradient and was given one", [loss, one], gradients=[None, one])
    refused(engine, "found list; pass the element of it that is the loss, or outputs together with gradients", [loss])
    engine.backward([one, loss], gradients=[None, one / 2], micro_batch=first)
    loss = engine(inputs(1))
    refused(engine, "is marked as the first of an update, but gradients", loss, micro_batch=first)
    engine.backward(loss, micro_batch=last)
    engine.step()
    assert engine.global_steps == 1
    counted = engine_of(tower(), 2, accumulation=2)
    for number in range(2):
        counted.backward(counted(inputs(number)))
        counted.step()
    assert_states_equal(full_masters(engine), full_masters(counted))
    for number in range(2):  # no call marks the boundary: steps are counted, from here
        engine.backward(engine(inputs(number)))
        engine.step()
        assert engine.global_steps == 1 + number


class Counted:
    """Counts what the ranks ask each other about gathers, and the gathers."""

    def __init__(self, engine: Any) -> None:
        self.requested = self.gathered = 0
        agreement, transport = engine._runtime.agreement, engine._runtime.buckets[0].group.gather
        collect, all_gather = agreement.collect, transport.all_gather

        def counted_collect(*arguments: Any, **more: Any) -> Any:
            self.requested += 1
            return collect(*arguments, **more)

        def counted_gather(*arguments: Any, **more: Any) -> Any:
            self.gathered += 1
            return all_gather(*arguments, **more)

        agreement.collect, transport.all_gather = counted_collect, counted_gather

    def take(self) -> tuple[int, int]:
        """Both numbers since the last call."""
        taken = self.requested, self.gathered
        self.requested = self.gathered = 0
        return taken


def parts_keep_their_orders() -> None:
    """Parts that take turns follow their own orders, and what each kept stays until its own backward is over."""
    engine = chain_engine(3, **NOTHING_KEPT)
    counted = Counted(engine)
    for update in range(3):
        run_update(engine, update, shuffled(5))
        requested, gathered = counted.take()
    assert requested == 0 and gathered > 0, (requested, gathered)
    # Kept: nothing is gathered for a backward, whatever backwards of other forwards come before it.
    model = tower()
    engine = engine_of(model, 3, accumulation=3, zero={"stage3_param_persistence_threshold": 0})
    counted = Counted(engine)
    for update in range(2):
        losses = [engine(inputs(update, number, rank())) for number in range(3)]
        _, forwards = counted.take()
        for number, loss in enumerate(losses):
            engine.backward(loss, micro_batch=MicroBatch(number, is_first=number == 0, is_last=number == 2))
            assert counted.take()[1] == 0
            kept = [bucket.is_kept for bucket in engine._runtime.buckets if bucket.is_sharded]
            assert any(kept) is (number < 2)
        engine.step()
        counted.take()
        assert forwards == len(kept)


def parts_without_an_engine() -> None:
    """A part that is called directly announces its backward, so that the user's own ``backward()`` knows its order."""
    engine, reference = chain_engine(3, **NOTHING_KEPT), chain_engine(1)
    counted = Counted(engine)
    for update in range(3):
        for each in (engine, reference):
            each.set_gradient_accumulation_boundary(True)
            for part in (0, 2):
                counted.take()
                each.module.parts[part](inputs(update, part, rank()).double()).square().mean().backward()
                assert each is reference or update == 0 or counted.take()[0] == 0
            each.step()
    assert_states_equal(full_masters(engine), full_masters(reference), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("check", [parts_keep_their_orders, parts_without_an_engine])
def test_parts(check: Any) -> None:
    run_ranks(check, 2)
