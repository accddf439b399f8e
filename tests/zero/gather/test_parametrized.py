"""Weights computed from others: weight_norm and spectral_norm, old forms and parametrizations; and pruned ones."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from deepspeed.zero import Init
from deepspeed.zero.address import State, address_of
from tests.engine.support import WIDTH, engine_of, inputs, rank
from tests.harness import on_ranks, run_ranks
from tests.zero.gather.beside_torch import EVERY_STAGE, LIMITS, STAGE_3, compare


class Symmetric(nn.Module):
    def forward(self, x):
        return x + x.mT


def _new_norm(module):
    return parametrizations.weight_norm(module)


def _old_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


def _symmetric(module):
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


def _pruned(module):
    prune.l1_unstructured(module, "weight", amount=0.3)
    return module


CHANGES = {
    "weight_norm": _new_norm,
    "old weight_norm": _old_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": _symmetric,
    "pruned": _pruned,
}


class Net(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(change(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(3)])
        self.head = change(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def _loss(model, step, of):
    """A forward in training may change buffers (spectral_norm); every rank's forward starts from the same ones."""
    if of > 0 and isinstance(model, Net):
        for name, value in model.start.items():
            model.get_buffer(name).copy_(value)
    elif isinstance(model, Net):
        model.start = {name: value.clone() for name, value in model.named_buffers()}
    return model(inputs(step, of))


def _train(names, stages):
    for name in names:
        compare(lambda name=name: Net(CHANGES[name]), _loss, stages=stages)


def _built_sharded():
    def build(model, change):
        torch.manual_seed(3)
        with Init():
            return Net(change)

    for name in ("weight_norm", "old weight_norm"):
        change = CHANGES[name]
        compare(
            lambda change=change: Net(change),
            _loss,
            stages=STAGE_3[:1],
            prepare=lambda model, change=change: build(model, change),
        )


class Probe(nn.Module):
    """Notes which buckets are whole at this point of forward."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append([bucket.state is State.FULL for bucket in self.look()])
        return x


def _held():
    """The hook that computes the weight belongs to the unit: what it reads is given back with the unit."""
    for name in ("old weight_norm", "old spectral_norm"):
        probe = Probe()
        layers = [CHANGES[name](nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
        model = nn.Sequential(*(part for layer in layers for part in (layer, probe)))
        engine = engine_of(model, 3, zero=LIMITS["all sharded"])
        probe.look = lambda first=layers[0].bias: address_of(first).bucket.owner.buckets
        engine(inputs(0, rank()))
        assert len(probe.seen) == 4 and all(len(states) == 4 for states in probe.seen)
        assert all(sum(states) <= 1 for states in probe.seen), name


@on_ranks(2)
def test_weights_that_are_computed_train_at_stage_3():
    _train(CHANGES, STAGE_3[:1])
    _built_sharded()
    _held()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_that_are_computed_train_at_every_stage(ranks):
    run_ranks(_train, ranks, list(CHANGES), EVERY_STAGE, timeout=180)
