"""Parameters that are used in ways which sharding does not expect, against plain torch."""

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.zero import GatheredParameters
from tests.engine.support import WIDTH, engine_of, inputs, rank
from tests.harness import on_ranks
from tests.harness.toy_models import Layer
from tests.zero.gather.beside_torch import LIMITS, compare


def _loss(model, step, of):
    return model(inputs(step, of))


class _Product(torch.autograd.Function):
    """``x @ w.T`` with a backward of its own, as fused kernels are called."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.mm(x, w.t())

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class _OfAnother(nn.Module):
    """Hands a parameter of another module to an autograd function, and asks for its shape before it is gathered."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.other = [other]  # no child

    def forward(self, x):
        weight, bias = self.other[0].weight, self.other[0].bias
        assert weight.shape == (WIDTH, WIDTH) and weight.numel() == WIDTH * WIDTH and len(bias) == WIDTH
        return _Product.apply(self.own(x), weight) + bias.shape[0] * 0.01


class Borrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.lender = nn.Linear(WIDTH, WIDTH)
        self.borrower = _OfAnother(self.lender)
        self.last = Layer()

    def forward(self, x):
        return self.last(self.borrower(self.lender(self.first(x)))).square().mean()


def _shapes_seen_by_a_hook(module, args):
    rows, columns = module.weight.shape
    assert rows * columns == module.weight.numel() == WIDTH * WIDTH, tuple(module.weight.shape)
    return (args[0] * (columns / rows),)


class Hooked(nn.Module):
    """Hooks of the user's that read parameters before the forward of their module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = old_weight_norm(nn.Linear(WIDTH, WIDTH))
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.middle.register_forward_pre_hook(_shapes_seen_by_a_hook)
        self.last = Layer()

    def forward(self, x):
        return self.last(self.middle(self.first(x))).square().mean()


class Parametrized(nn.Module):
    """Weights that are computed whenever they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.middle = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.last = Layer()

    def forward(self, x):
        return self.last(self.middle(self.first(x))).square().mean()


@on_ranks(2)
def test_borrowed_hooked_and_parametrized_weights():
    for make in (Borrowing, Hooked, Parametrized):
        compare(make, _loss)


class Writing(nn.Module):
    """Forwards that write into parameters: rows of limited norm, a weight kept in bounds, one assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, WIDTH, max_norm=0.8)
        self.bounded = nn.Linear(WIDTH, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH)
        self.last = Layer()

    def forward(self, x):
        with torch.no_grad():
            self.bounded.weight.clamp_(-0.2, 0.2)  # of another module, not gathered yet
        self.fixed.weight.data = self.fixed.weight.detach() * 0 + 0.125
        x = x + self.rows(torch.arange(5, device=x.device)).sum(0)
        return self.last(self.fixed(self.bounded(x))).square().mean()


@on_ranks(2)
def test_what_a_forward_writes_is_kept():
    compare(Writing, _loss)
    engine = engine_of(Writing(), 3, bf16={"enabled": True}, zero=LIMITS["all sharded"])
    weight = engine.module.bounded.weight
    before = safe_get_full_fp32_param(weight)
    with torch.no_grad():
        engine(inputs(0, rank()).bfloat16())
    after = safe_get_full_fp32_param(weight)
    bound = before.bfloat16().float().clamp(-0.2, 0.2).bfloat16().float()
    inside = before.bfloat16().float() == bound
    assert inside.any() and not inside.all()
    assert torch.equal(after, torch.where(inside, before, bound))  # precise where nothing was written
    assert all(torch.equal(p, after.bfloat16()) for n, p in engine.iter_full("param") if n == "bounded.weight")
    # A block around the forward drops what is written inside it, a block inside keeps what was written before.
    with GatheredParameters(list(engine.module.parameters())), torch.no_grad():
        weight.fill_(3)
        engine(inputs(0, rank()).bfloat16())
    assert torch.equal(safe_get_full_fp32_param(weight), after)


@on_ranks(4)
def test_what_a_forward_writes_is_kept_by_groups_and_in_files(tmp_path):
    folder = str(tmp_path)
    tiers = {"device": "nvme", "nvme_path": folder}
    compare(
        Writing,
        _loss,
        steps=2,
        stages=[
            (3, {**LIMITS["all sharded"], "zero_hpz_partition_size": 2}),
            (3, {**LIMITS["all sharded"], "offload_param": tiers, "offload_optimizer": tiers}),
        ],
    )


def _penalized(model, step, of):
    """A loss with a penalty on the gradient of the inputs, as of critics: a backward that is differentiated itself."""
    x = inputs(step, of).requires_grad_()
    loss = model(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


class Layered(nn.Module):
    """Layers whose second derivatives need weights again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@on_ranks(2)
def test_a_gradient_penalty():
    compare(Layered, _penalized)
