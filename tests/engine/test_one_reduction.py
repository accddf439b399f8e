"""Several backwards before one update, reduced once; and torch.func through the engine. Compared with plain torch."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad

from deepspeed.comm.base.counters import counted
from deepspeed.errors import CallOrderError, NotYetSupportedError
from tests.engine.support import engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters

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


def _train(kind, stage, accumulation=1, outside=False, **config):
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
            found = _train(kind, stage, accumulation, outside)
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
