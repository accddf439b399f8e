"""Which optimizers may be cut into fragments."""

import pytest
import torch

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.elementwise import OptimizerKind, is_elementwise
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon import Muon

TORCH = ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop", "SGD"]
OURS = [FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad]


@pytest.mark.parametrize("cls", [*(getattr(torch.optim, name) for name in TORCH), *OURS])
def test_elementwise(cls):
    run = torch.nn.Parameter(torch.zeros(64))
    assert is_elementwise(cls) and is_elementwise(cls([run], lr=0.1))


@pytest.mark.parametrize("cls", [getattr(torch.optim, name) for name in TORCH if name not in ("ASGD", "Rprop")])
def test_the_claim_holds(cls):
    """Cutting the run into two optimizers changes nothing beyond kernel tails."""
    torch.manual_seed(0)
    start, grad = torch.randn(256), torch.randn(256)
    results = []
    for cuts in ((0, 256), (0, 64, 256)):
        runs = [torch.nn.Parameter(start[a:b].clone()) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        optimizer = cls(runs, lr=0.01)
        for _ in range(3):
            for run, a in zip(runs, cuts, strict=False):
                run.grad = grad[a : a + run.numel()].clone()
            optimizer.step()
        results.append(torch.cat([run.detach() for run in runs]))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS", "SparseAdam"])
def test_shape_needing_is_named_with_a_reason(name):
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    verdict = is_elementwise(getattr(torch.optim, name))
    assert not verdict and verdict.kind is OptimizerKind.WHOLE and len(verdict.reason) > 20


@pytest.mark.parametrize("cls", [FusedLamb, Muon])
def test_ours_with_fragments(cls):
    assert is_elementwise(cls).kind is OptimizerKind.FRAGMENTS


class Tuned(torch.optim.AdamW):
    def __init__(self, params):
        super().__init__(params, lr=0.5)


class Rewritten(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class RewrittenOurs(FusedAdam):
    def step(self, closure=None):
        return super().step(closure)


class BelowRewritten(Rewritten):
    pass


class RewrittenHalf(torch.optim.Adam):
    def _init_group(self, *args, **kwargs):
        return super()._init_group(*args, **kwargs)


class Own(torch.optim.Optimizer):
    pass


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (Tuned, OptimizerKind.ELEMENTWISE),
        (Rewritten, OptimizerKind.UNKNOWN),
        (BelowRewritten, OptimizerKind.UNKNOWN),
        (RewrittenOurs, OptimizerKind.UNKNOWN),
        (RewrittenHalf, OptimizerKind.UNKNOWN),
        (Own, OptimizerKind.UNKNOWN),
    ],
)
def test_subclasses(cls, kind):
    verdict = is_elementwise(cls)
    assert verdict.kind is kind
    assert (kind is OptimizerKind.ELEMENTWISE) == (not verdict.reason)
