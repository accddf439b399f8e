"""Models that nobody wrote with sharding in mind, against plain torch."""

import collections
import dataclasses
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import weight_norm as old_weight_norm

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.zero import GatheredParameters, Init
from deepspeed.zero.address import State, address_of
from tests.engine.support import WIDTH, engine_of, inputs, rank
from tests.harness import on_ranks, run_ranks
from tests.harness.cases import EVERY_STAGE, LIMITS, STAGE_3, Case, Plain, check, seeded
from tests.harness.toy_models import Layer, tower

# Modules that return anything, run twice or not at all, see another shape each time, or change what they train.


def _loss(model, step, of):
    return model(inputs(step, of))


Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Record:
    hidden: torch.Tensor
    extra: dict[str, torch.Tensor]
    nothing: None = None


class Returns(nn.Module):
    """One unit that returns its result in some form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer = Layer()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.form = form

    def forward(self, x):
        y = self.layer(x)
        forms = {
            "tuple": lambda: (y, (self.scale * 2, None)),
            "dict": lambda: {"hidden": y, "rest": [self.scale * 2]},
            "dataclass": lambda: Record(y, {"scale": self.scale * 2}),
            "namedtuple": lambda: Pair(y, self.scale * 2),
        }
        if self.form == "None":
            self.seen = y.mean()
            return None
        return forms[self.form]()


class EveryForm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Returns(form) for form in ("tuple", "dict", "dataclass", "namedtuple", "None"))
        self.never = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x, (scale, _) = self.blocks[0](x)
        found = self.blocks[1](x * scale)
        record = self.blocks[2](found["hidden"] * found["rest"][0])
        pair = self.blocks[3](record.hidden * record.extra["scale"])
        assert self.blocks[4](pair.first) is None
        x = self.blocks[0](pair.first * pair.second)[0]  # the first one again
        return self.head(x).square().mean() + self.blocks[4].seen.square()


@on_ranks(2)
def test_anything_may_be_returned_and_units_run_twice_or_never():
    check(Case("forms", EveryForm, _loss))


class Sequence(nn.Module):
    """Batches and lengths that change, also to one and between ranks; the number of units that run follows them."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(12, WIDTH) / 10)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _lengths(model, step, of):
    generator = torch.Generator().manual_seed(10 * step + of)
    batch, length = 1 + (step + of) % 3, 1 + (5 * step + 7 * of) % 12
    return model(torch.randn(batch, length, WIDTH, generator=generator))


@on_ranks(pytest.param(2, marks=pytest.mark.slow), 3)
def test_shapes_that_change():
    check(Case("lengths", Sequence, _lengths, steps=4))


# -- frozen and unfrozen between steps -------------------------------------------------------------------------------


def _begins_frozen():
    model = tower()
    for parameter in (*model.layers[1].parameters(), model.last.bias):
        parameter.requires_grad_(False)
    return model


def _thaw(model, step):
    """Unfreezes what began frozen, freezes a unit and half of another, and unfreezes some of it again."""
    if step == 2:
        model.layers[1].requires_grad_(True)
    if step == 3:
        model.layers[2].requires_grad_(False)
        model.layers[0].rise.requires_grad_(False)
        model.last.bias.requires_grad_(True)
    if step == 4:
        model.layers[2].requires_grad_(True)


def _frozen(stages):
    check(Case("frozen", _begins_frozen, _loss, steps=6, stages=stages, change=_thaw))


def _frozen_in_bf16():
    engines = [engine_of(_begins_frozen(), stage, bf16={"enabled": True}) for stage in (0, 1, 3)]
    for step in range(6):
        for engine in engines:
            _thaw(engine.module, step)
            engine.backward(engine(inputs(step, rank())))
            engine.step()
        weights = [dict(engine.iter_full("fp32")) for engine in engines]
        for other in weights[1:]:
            assert all(torch.equal(other[name], value) for name, value in weights[0].items())


def test_parameters_frozen_and_unfrozen_between_steps():
    run_ranks(_frozen, 2, EVERY_STAGE)
    run_ranks(_frozen, 1, EVERY_STAGE[2:4])


def test_unfreezing_in_bf16_and_in_groups():
    groups = [(3, {**STAGE_3[0][1], key: 2}) for key in ("zero_hpz_partition_size", "mics_shard_size")]
    run_ranks(_frozen, 4, groups)
    run_ranks(_frozen_in_bf16, 2)


@on_ranks(2)
def test_what_is_unfrozen_is_counted_and_saved(folder):
    """What is unfrozen is counted, saved, and restored into an engine that begins with it."""
    engine = engine_of(_begins_frozen(), 3)
    for step in range(3):
        _thaw(engine.module, step)
        engine.backward(engine(inputs(step, rank())))
        engine.step()
    for kind, counted, formula, _ in engine.memory_report():
        assert counted == formula, kind
    expected = {kind: dict(engine.iter_full(kind)) for kind in ("fp32", "exp_avg")}
    assert "layers.1.rise.weight" in expected["exp_avg"] and "last.bias" not in expected["exp_avg"]
    engine.save_checkpoint(folder)
    other = engine_of(tower(seed=9), 3)
    other.load_checkpoint(folder)
    found = {kind: dict(other.iter_full(kind)) for kind in ("fp32", "exp_avg")}
    for kind in expected:
        for name, value in expected[kind].items():
            assert torch.equal(found[kind][name], value), (kind, name)


@on_ranks(2)
def test_what_is_unfrozen_but_in_no_group_is_not_trained():
    model = _begins_frozen()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = engine_of(model, 3, optimizer=lambda _: torch.optim.AdamW(trained, lr=0.01))
    before = dict(engine.iter_full("fp32"))
    model.layers[1].requires_grad_(True)
    for step in range(2):
        engine.backward(engine(inputs(step, rank())))
        engine.step()
    assert all(parameter.grad is None for parameter in model.layers[1].parameters())
    after = dict(engine.iter_full("fp32"))
    assert all(torch.equal(after[n], before[n]) == n.startswith(("layers.1", "last.bias")) for n in before)


# -- losses, precision inside forward, transforms, modes -------------------------------------------------------------


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = tower().layers, nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 5)

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
        return self.a(x), self.b(x)


@on_ranks(2)
def test_losses_with_many_elements_and_outputs():
    """A loss with many elements through ``gradient=``, and one through two of the model's outputs."""
    plain, engine = Plain(Outputs), engine_of(seeded(Outputs), 3)

    def expected(model, of, step):
        a, b = model(inputs(step, of))
        return (a.square() * 0.5).sum() + (0 if step % 2 else 0.1 * b.sum())

    for step in range(3):
        a, b = engine(inputs(step, rank()))
        if step % 2:
            engine.backward(a.square(), gradient=torch.full_like(a, 0.5))
        else:
            torch.autograd.backward([a.square(), b.sum()], [torch.full_like(a, 0.5), torch.tensor(0.1)])
        engine.step()
        plain.step(lambda model, of, step=step: expected(model, of, step))
        plain.assert_masters(engine)
    with pytest.raises(deepspeed.errors.CallOrderError, match="one element"):
        engine.backward(engine(inputs(9, rank()))[0])
    engine.backward(sum(out.sum() for out in engine(inputs(9, rank()))))
    engine.step()


class Inside(nn.Module):
    """Autocast, no_grad and torch.func inside forward."""

    def __init__(self, *, autocast: bool = False, transform: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.autocast, self.transform = autocast, transform

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            x = self.layers[0](x)
            with torch.no_grad():
                statistics = self.layers[1](x).float().std()
            with torch.autocast("cpu", enabled=False):
                x = self.norm(x.float() / (1 + statistics))
            x = self.layers[1](x)
        x = self._transformed(x.float())
        return self.layers[2](x).square().mean()

    def _transformed(self, x):
        if self.transform == "vmap":
            return torch.func.vmap(lambda row: torch.tanh(row) * row.sum())(x)
        if self.transform == "grad":
            return x + torch.func.vmap(torch.func.grad(lambda row: row.square().sum().sin()))(x)
        if self.transform == "jvp":
            return x + torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]
        if self.transform == "jacrev":
            return x + torch.func.jacrev(lambda z: z.square().mean(0))(x).sum((0, 1))
        if self.transform == "functional_call":
            own = {"weight": torch.eye(WIDTH), "bias": torch.zeros(WIDTH)}
            return torch.func.functional_call(nn.Linear(WIDTH, WIDTH, device="meta"), own, (x,))
        return x


TRANSFORMS = ("vmap", "grad", "jvp", "jacrev", "functional_call")  # which see no parameters


@on_ranks(2)
def test_autocast_no_grad_and_function_transforms_inside_forward():
    check(
        Case("autocast", lambda: Inside(autocast=True), _loss),
        *(Case(name, lambda name=name: Inside(transform=name), _loss, stages=STAGE_3) for name in TRANSFORMS),
    )


class Experts(nn.Module):
    """A mixture whose ranks pick different experts; gathered whole, since it is marked as a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x, chosen):
        weight = torch.softmax(self.gate(x), -1)
        return x + sum(weight[:, index, None] * self.experts[index](x) for index in chosen)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Experts(), Layer(), Experts()])

    def forward(self, x, routes):
        for index, layer in enumerate(self.layers):
            x = layer(x, routes[index // 2]) if index % 2 else layer(x)
        return x.square().mean()


def _mixture(leaf):
    def prepare(model):
        if leaf:
            assert deepspeed.utils.set_z3_leaf_modules(model, [Experts]) == [model.layers[1], model.layers[3]]
            assert deepspeed.utils.z3_leaf_module(model.layers[1])
        return model

    def loss(model, step, of):
        routes = [[(step + of) % 4], [of % 4, (step + 2) % 4] if step % 2 else []]
        return model(inputs(step, of), routes)

    # Without the mark a unit is what is small enough, which under the first limits is each expert by itself.
    return Case(f"marked {leaf}", Mixture, loss, steps=4, stages=STAGE_3 if leaf else STAGE_3[1:], prepare=prepare)


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_ranks_may_pick_different_experts_inside_a_unit():
    check(_mixture(True), _mixture(False))


# Models that do odd things with their parameters, against plain torch; what cannot be right is refused by name.


# -- dtypes ----------------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """A complex weight, which may be frozen but not trained, and frozen parameters of other dtypes."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        turn = torch.polar(torch.ones(WIDTH), torch.arange(WIDTH).float())
        self.turn = nn.Parameter(turn, requires_grad=is_trained)
        self.keep = nn.Parameter(torch.arange(WIDTH) % 2 == 0, requires_grad=False)
        self.order = nn.Parameter(torch.arange(WIDTH, dtype=torch.int16), requires_grad=False)
        self.exact = nn.Linear(WIDTH, WIDTH).double()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.exact(self.mix(x).double()).float()
        return ((x * self.turn).real * self.order)[:, self.keep].square().mean()


@on_ranks(2)
def test_unusual_dtypes_stay_as_they_are_and_complex_ones_are_not_trained():
    def ready(engine):
        for name, counted, formula, _ in engine.memory_report():
            assert counted == formula, name

    check(
        Case("dtypes", lambda: Turned(False), _loss, stages=[(1, {}), *STAGE_3], ready=ready, tolerance={"rtol": 1e-4})
    )
    for stage in (0, 3):
        with pytest.raises(
            DeepSpeedConfigError, match=r"parameter 'turn' \(param group 0\) is torch.complex64; expected"
        ):
            engine_of(Turned(True), stage)
    engine = engine_of(Turned(False), 3)
    engine.module.turn.requires_grad_(True)
    with pytest.raises(DeepSpeedConfigError, match="complex64 and cannot be trained from now on"):
        engine.backward(engine(inputs(0, rank())))


@on_ranks(2)
def test_attention_evaluates():
    """Fast paths of attention in evaluation read all parameters of a block at once."""

    def make():
        kind = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(kind, 2, enable_nested_tensor=False)

    plain, engine = seeded(make), engine_of(seeded(make), 3)
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(rank()))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(engine.eval()(x), plain.eval()(x))


# Parameters that are used in ways which sharding does not expect, against plain torch.


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
    check(*(Case(make.__name__, make, _loss) for make in (Borrowing, Hooked, Parametrized)))


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
    check(Case("writing", Writing, _loss))
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
def test_what_a_forward_writes_is_kept_by_groups_and_in_files(folder):
    tiers = {"device": "nvme", "nvme_path": folder}
    sharded = LIMITS["all sharded"]
    stages = [
        (3, {**sharded, "zero_hpz_partition_size": 2}),
        (3, {**sharded, "offload_param": tiers, "offload_optimizer": tiers}),
    ]
    check(Case("writing", Writing, _loss, steps=2, stages=stages))


def _penalized(model, step, of):
    """A loss with a penalty on the gradient of the inputs, as of critics: a backward that is differentiated itself."""
    x = inputs(step, of).requires_grad_()
    loss = model(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


@on_ranks(2)
def test_a_gradient_penalty():
    check(Case("penalty", tower, _penalized))


# Weights computed from others: weight_norm and spectral_norm, old forms and parametrizations; and pruned ones.


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


def _loss_parametrized(model, step, of):
    """A forward in training may change buffers (spectral_norm); every rank's forward starts from the same ones."""
    if of > 0 and isinstance(model, Net):
        for name, value in model.start.items():
            model.get_buffer(name).copy_(value)
    elif isinstance(model, Net):
        model.start = {name: value.clone() for name, value in model.named_buffers()}
    return model(inputs(step, of))


def _computed(names, stages):
    return [Case(name, lambda name=name: Net(CHANGES[name]), _loss_parametrized, stages=stages) for name in names]


def _built_sharded(change):
    torch.manual_seed(3)
    with Init():
        return Net(change)


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
    check(*_computed(CHANGES, STAGE_3[:1]))
    for case in _computed(("weight_norm", "old weight_norm"), STAGE_3[:1]):
        check(replace(case, prepare=lambda model, name=case.name: _built_sharded(CHANGES[name])))
    _held()


@pytest.mark.slow
@on_ranks(2, 3, timeout=180)
def test_weights_that_are_computed_train_at_every_stage():
    check(*_computed(CHANGES, EVERY_STAGE))
