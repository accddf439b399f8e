"""Recomputation under stage 3: torch's two kinds of checkpointing give the gradients of a plain forward."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.zero.gather.handles import SavedTensorHooks
from deepspeed.zero.passes import PassTracker
from tests.engine.support import WIDTH, engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks
from tests.harness.toy_models import Layer, tower
from tests.zero.reading import full_masters


class Recomputed(nn.Module):
    """The tower with every layer, or pairs of layers, under a checkpoint."""

    def __init__(self, reentrant, per_checkpoint=1, own_layers=None):
        super().__init__()
        plain = tower()
        self.first, self.layers, self.last = plain.first, own_layers or plain.layers, plain.last
        self.reentrant = reentrant
        self.per_checkpoint = per_checkpoint

    def forward(self, x):
        x = self.first(x)
        layers = list(self.layers)
        for start in range(0, len(layers), self.per_checkpoint):
            part = nn.Sequential(*layers[start : start + self.per_checkpoint])
            x = part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)
        return self.last(x).float().square().mean()


def _train(model, zero, own_backward, accumulation=2):
    engine = engine_of(model, 3, zero=zero, accumulation=accumulation)
    for step in range(3):
        for micro in range(accumulation):
            loss = engine(inputs(step, micro, rank()))
            if own_backward:
                (loss / accumulation).backward()
            else:
                engine.backward(loss)
            engine.step()
        if zero["stage3_param_persistence_threshold"] == 0:
            assert all(tuple(p.shape) == (0,) for p in engine.module.parameters())
    return full_masters(engine)


LIMITS = [
    {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
    {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 500},
]


@pytest.mark.parametrize(
    ("reentrant", "per_checkpoint"),
    [(False, 2), (True, 1), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((False, 1), (True, 2)))],
)
@on_ranks(2)
def test_bitwise_equal_to_the_plain_forward(reentrant, per_checkpoint):
    for zero in LIMITS:
        for own_backward in (False, True):
            plain = _train(Recomputed(None), zero, own_backward)
            recomputed = _train(Recomputed(reentrant, per_checkpoint), zero, own_backward)
            assert_states_equal(recomputed, plain)


class Detaching(Layer):
    """Uses its weight twice, the first time without a gradient: that use's backward comes last, after the gradient."""

    def forward(self, x):
        x = x @ self.square.detach()
        return x + self.fall(torch.tanh(self.rise(x))) @ self.square

    def __init__(self):
        super().__init__()
        self.square = nn.Parameter(torch.eye(WIDTH) + 0.1)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_a_use_without_gradient_before_the_use_with_one(reentrant):
    """The bucket must not be freed when its gradients are in: what the detached use saved is still needed."""

    def model(kind):
        torch.manual_seed(3)
        return Recomputed(kind, own_layers=nn.ModuleList(Detaching() for _ in range(4)))

    for zero in LIMITS:
        assert_states_equal(_train(model(reentrant), zero, False), _train(model(None), zero, False))


class Shared(nn.Module):
    """One layer used in two checkpoints: its gradient arrives twice when recomputation is reentrant."""

    def __init__(self, reentrant):
        super().__init__()
        plain = tower()
        self.first, self.layers, self.last = plain.first, plain.layers, plain.last
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for index in (0, 1, 2, 1, 3, 0):
            layer = self.layers[index]
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x).square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_a_layer_in_two_checkpoints(reentrant):
    for zero in LIMITS:
        shared, plain = (_train(Shared(kind), zero, False) for kind in (reentrant, None))
        assert_states_equal(shared, plain, rtol=1e-6, atol=1e-7)


class FrozenBetween(Recomputed):
    """Frozen layers get no gradient that could say when they may be freed."""

    def __init__(self, reentrant):
        super().__init__(reentrant)
        self.layers[1].requires_grad_(False)
        self.layers[2].rise.requires_grad_(False)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_frozen_layers(reentrant):
    for zero in LIMITS:
        assert_states_equal(_train(FrozenBetween(reentrant), zero, False), _train(FrozenBetween(None), zero, False))


class Encoders(nn.Module):
    """Two layers as direct attributes, so that each of their modules is a unit; the first one's norm is frozen."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(3)
        width = {"d_model": 32, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        self.lower, self.upper = (nn.TransformerEncoderLayer(**width) for _ in range(2))
        self.lower.norm1.requires_grad_(False)
        self.rise = nn.Linear(WIDTH, 32)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.rise(x).unsqueeze(1)
        for layer in (self.lower, self.upper):
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


class FrozenFirst(Recomputed):
    """A frozen layer that is recomputed together with the next one."""

    def __init__(self, reentrant):
        super().__init__(reentrant, per_checkpoint=2)
        self.layers[0].requires_grad_(False)


class KeptAsTheyAre(Recomputed):
    """Hooks of the program keep what autograd saves, parameters among it, as it is."""

    def __init__(self, kept):
        super().__init__(None)
        self.kept = kept
        self.layers[1].requires_grad_(False)

    def forward(self, x):
        if self.kept is None:
            return super().forward(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return super().forward(x)


@on_ranks(2)
def test_hooks_that_keep_parameter_objects():
    """A parameter object loses its values when its bucket is resharded; what others keep of it must not."""
    for zero in (*LIMITS, {"stage3_param_persistence_threshold": 20}):
        for model, kind in ((Encoders, False), (FrozenFirst, False), (KeptAsTheyAre, True)):
            changed, plain = (_train(model(how), zero, False) for how in (kind, None))
            assert all(bool(value.isfinite().all()) for value in changed.values())
            assert_states_equal(changed, plain)


def test_each_engine_guards_its_own_buckets_under_one_foreign_hook():
    def bucket_of(tensor):
        return SimpleNamespace(full=SimpleNamespace(storage_key=tensor.untyped_storage()._cdata, on_move=None))

    kept = []
    parameters = [torch.nn.Parameter(torch.ones(3), requires_grad=False) for _ in range(2)]
    hooks = [SavedTensorHooks([bucket_of(p)], None, PassTracker()) for p in parameters]
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        assert hooks[0].push_guard() and hooks[1].push_guard()  # of an engine within another one's forward
        assert not hooks[1].push_guard()
        x * parameters[0] * parameters[1]
        hooks[1].pop_guard()
        hooks[0].pop_guard()
    addresses = {p.data_ptr() for p in parameters}
    found = [tensor for tensor in kept if tensor.data_ptr() in addresses]
    assert len(found) == 2 and not any(tensor is p for tensor in found for p in parameters)
