"""Masters, gradients and optimizer states of single parameters, and walks over all of them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.comm.base.counters import counted
from deepspeed.errors import CallOrderError, DeepSpeedConfigError, DivergenceError
from deepspeed.utils import set_z3_leaf_modules
from deepspeed.zero.access import states as access
from deepspeed.zero.access import whole_buckets
from tests.engine.support import engine_of, same_on_all_ranks
from tests.harness import on_ranks
from tests.zero.access.support import Model, batch, build, reference, reference_backward, train

# safe_get_* and safe_set_*: master weights, gradients and optimizer states of single parameters.


STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 3), (3, 1)])
@on_ranks()
def test_masters_and_states_are_those_of_plain_torch(rank, stage, ranks):
    engine = build(stage)
    wanted, optimizer = reference(ranks, 2)
    params = dict(engine.module.named_parameters())
    assert access.safe_get_full_optimizer_state(params["first.weight"], "exp_avg") is None
    assert access.safe_get_full_grad(params["first.weight"]) is None
    train(engine, rank, 2)
    for name, plain in wanted.named_parameters():
        found = access.safe_get_full_fp32_param(params[name])
        state = access.safe_get_full_optimizer_state(params[name], "exp_avg")
        count = access.safe_get_full_optimizer_state(params[name], "step")
        assert access.safe_get_full_grad(params[name]) is None, name
        if not plain.requires_grad:
            assert found is None and state is None
            continue
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, plain.detach(), rtol=2e-5, atol=1e-6)
        if name in ("unused", "nothing"):
            assert state is None or not state.any(), name
            continue
        torch.testing.assert_close(state, optimizer.state[plain]["exp_avg"], rtol=2e-5, atol=1e-7)
        assert count == 2
        local = access.safe_get_local_fp32_param(params[name])
        assert local.dim() == 1
        total = torch.tensor([local.numel()])
        dist.all_reduce(total)
        assert total == plain.numel() * (1 if stage else ranks)
    with pytest.raises(DeepSpeedConfigError, match="exp_average"):
        access.safe_get_full_optimizer_state(params["first.weight"], "exp_average")


@pytest.mark.parametrize(
    ("stage", "ranks", "fp16"),
    [(0, 2, False), (1, 2, False), (2, 2, False), (3, 2, False), (3, 3, False), (3, 1, False)],
)
@on_ranks()
def test_gradients_between_backward_and_step(rank, stage, ranks, fp16):
    torch.manual_seed(3)
    model = Model()
    more = {"fp16": {"enabled": True, "loss_scale": 128}} if fp16 else {}
    engine = build(stage, model, **more)
    torch.manual_seed(3)
    plain = Model()
    reference_backward(plain, ranks, 0)
    dtype = torch.float16 if fp16 else torch.float32
    engine.backward(engine(batch(rank, 0, dtype)))
    params = dict(engine.module.named_parameters())
    tolerance = {"rtol": 0.02, "atol": 2e-3} if fp16 else {"rtol": 1e-5, "atol": 1e-7}
    for name, wanted in plain.named_parameters():
        found = access.safe_get_full_grad(params[name])
        if wanted.grad is None:
            assert found is None, name
            continue
        torch.testing.assert_close(found, wanted.grad, **tolerance)
    # One rank's part of each, put together, is the whole.
    local = access.safe_get_local_grad(params["blocks.1.rise.weight"])
    whole = access.safe_get_full_grad(params["blocks.1.rise.weight"]).view(-1)
    parts = [None] * ranks
    dist.all_gather_object(parts, local)
    torch.testing.assert_close(torch.cat(parts) if stage else parts[0], whole, rtol=0, atol=0)
    # What is written is what is read, and what the update uses.
    access.safe_set_full_grad(params["last.bias"], torch.tensor([1.0, -2.0, 4.0]))
    assert access.safe_get_full_grad(params["last.bias"]).tolist() == [1.0, -2.0, 4.0]
    access.safe_set_local_grad(
        params["last.weight"], torch.zeros_like(access.safe_get_local_grad(params["last.weight"]))
    )
    assert not access.safe_get_full_grad(params["last.weight"]).any()
    before = access.safe_get_full_fp32_param(params["last.bias"])
    engine.step()
    change = access.safe_get_full_fp32_param(params["last.bias"]) - before * (1 - 0.01 * 0.01)
    torch.testing.assert_close(change, torch.tensor([-0.01, 0.01, -0.01]), rtol=1e-4, atol=1e-6)
    with pytest.raises(CallOrderError, match="no gradient now"):
        access.safe_set_full_grad(params["last.bias"], torch.zeros(3))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_what_is_set_is_what_trains(rank, stage, bf16):
    more = {"bf16": {"enabled": True}} if bf16 else {}
    engine = build(stage, **more)
    train(engine, rank, 1)
    params = dict(engine.module.named_parameters())
    weight, other = params["blocks.0.fall.weight"], params["blocks.0.norm.weight"]
    value = torch.linspace(-3, 3, 105).reshape(7, 15) * 1.001
    access.safe_set_full_fp32_param(weight, value)
    assert torch.equal(access.safe_get_full_fp32_param(weight), value)
    # The compute copy follows, at every stage.
    seen = dict(engine.iter_full("param"))["blocks.0.fall.weight"]
    assert torch.equal(seen, value.to(seen.dtype))
    # It is no user's write: the next update starts from the exact value.
    untouched = access.safe_get_full_fp32_param(other)
    access.safe_set_full_optimizer_state(weight, torch.zeros(7, 15), "exp_avg")
    assert not access.safe_get_full_optimizer_state(weight, "exp_avg").any()
    local = access.safe_get_local_fp32_param(other)
    access.safe_set_local_fp32_param(other, local + 0.001)
    assert torch.equal(access.safe_get_full_fp32_param(other), untouched + 0.001)
    state = access.safe_get_local_optimizer_state(other, "exp_avg_sq")
    if local.numel():
        access.safe_set_local_optimizer_state(other, state * 2, "exp_avg_sq")
        assert torch.equal(access.safe_get_local_optimizer_state(other, "exp_avg_sq"), state * 2)
    else:
        assert state is not None and state.shape == (0,)
    engine.backward(engine(batch(rank, 1, seen.dtype)))
    for parameter in engine.module.parameters():
        if parameter.requires_grad and access.safe_get_full_grad(parameter) is not None:
            access.safe_set_full_grad(parameter, torch.zeros(getattr(parameter, "ds_shape", parameter.shape)))
    engine.step()
    # A zero gradient and zero momentum leave only weight decay.
    torch.testing.assert_close(access.safe_get_full_fp32_param(weight), value * (1 - 0.0001), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 3), (3, 1)])
@on_ranks()
def test_iter_full_reads_everything_by_bucket(rank, stage, ranks):
    engine = build(stage)
    engine.backward(engine(batch(rank)))
    params = dict(engine.module.named_parameters())
    buckets = len(engine._runtime.buckets)
    for kind, read in (
        ("grad", access.safe_get_full_grad),
        ("fp32", access.safe_get_full_fp32_param),
    ):
        with counted() as traffic:
            found = dict(engine.iter_full(kind))
            gathers = traffic.requested["all_gather"].calls
        if stage == 3 and ranks > 1:
            trained = sum(bucket.layout.trainable for bucket in engine._runtime.buckets)
            assert gathers == (trained if kind == "grad" else buckets)
        for name, parameter in params.items():
            wanted = read(parameter)
            if wanted is None:
                assert kind == "fp32" or name not in found, (kind, name)
            else:
                assert torch.equal(found[name], wanted), (kind, name)
    # In portions: the same values, at most so many bytes at once.
    with counted() as traffic:
        small = dict(engine.iter_full("grad", bucket_bytes=256))
        assert stage != 3 or ranks == 1 or traffic.requested["move"].calls > 3
    found = dict(engine.iter_full("grad"))
    assert list(small) == list(found)
    assert all(torch.equal(small[name], found[name]) for name in found)
    seen = dict(engine.iter_full("param"))
    assert set(seen) == set(params)
    engine.step()
    states = dict(engine.iter_full("exp_avg"))
    assert set(found) <= set(states)
    for name in found:
        assert torch.equal(states[name], access.safe_get_full_optimizer_state(params[name], "exp_avg")), name
    with pytest.raises(DeepSpeedConfigError, match="exp_average"):
        list(engine.iter_full("exp_average"))


@on_ranks(2)
def test_iter_full_reads_masters_as_the_program_has_written_the_parameters():
    engine = build(1, bf16={"enabled": True})
    weight = dict(engine.module.named_parameters())["first.weight"]
    with torch.no_grad():
        weight.fill_(3)
    assert dict(engine.iter_full("fp32"))["first.weight"].eq(3).all()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_parameters_without_a_gradient_are_left_alone(stage):
    engine = build(stage)
    unused = dict(engine.module.named_parameters())["unused"]
    engine.backward(engine(batch(dist.get_rank())))
    before = access.safe_get_full_fp32_param(unused)
    access.safe_update_full_grad_vectorized(engine.module.parameters(), lambda gradient, _: gradient)
    assert access.safe_get_full_grad(unused) is None
    engine.step()
    assert torch.equal(access.safe_get_full_fp32_param(unused), before), "no weight decay without a gradient"


@on_ranks(2)
def test_a_state_that_no_rank_has_yet_raises_on_every_rank():
    engine = build(3)
    for parameter in engine.module.parameters():  # each lies on some ranks only
        if parameter.requires_grad and parameter.ds_numel:
            with pytest.raises(CallOrderError, match="first update"):
                access.safe_set_full_optimizer_state(parameter, torch.zeros(parameter.ds_shape), "exp_avg")


@on_ranks(2)
def test_many_gradients_at_once(rank):
    engine = build(3)
    engine.backward(engine(batch(rank)))
    params = [p for p in engine.module.parameters() if p.requires_grad]
    before = {id(p): access.safe_get_full_grad(p) for p in params}
    seen = []

    def double(gradient, parameter):
        seen.append(id(parameter))
        return gradient * 2

    with counted() as traffic:
        access.safe_update_full_grad_vectorized(params, double)
        has_gradient = [any(before.get(id(p)) is not None for p in b.params) for b in engine._runtime.buckets]
        assert traffic.requested["all_gather"].calls == sum(has_gradient)
    assert set(seen) == {key for key, gradient in before.items() if gradient is not None}
    for parameter in params:
        if before[id(parameter)] is not None:
            assert torch.equal(access.safe_get_full_grad(parameter), before[id(parameter)] * 2)


@on_ranks(2)
def test_ranks_that_request_different_parameters_all_raise():
    engine = build(3)
    names = ["blocks.0.rise.weight", "blocks.1.rise.weight"]
    parameter = dict(engine.module.named_parameters())[names[dist.get_rank()]]
    with pytest.raises(DivergenceError) as caught:
        access.safe_get_full_fp32_param(parameter)
    assert all(name in str(caught.value) for name in names)


@on_ranks(2)
def test_calls_that_cannot_be_served_raise():
    engine = build(3)
    params = dict(engine.module.named_parameters())
    with pytest.raises(DeepSpeedConfigError, match=r"\(7, 15\)"):
        access.safe_set_full_fp32_param(params["blocks.0.fall.weight"], torch.zeros(3))
    with pytest.raises(CallOrderError, match="frozen"):
        access.safe_set_full_fp32_param(params["frozen"], torch.zeros(7))
    with pytest.raises(DeepSpeedConfigError, match="this rank's part"):
        access.safe_set_local_fp32_param(params["first.weight"], torch.zeros(1000))
    plain = torch.nn.Parameter(torch.ones(3))
    assert access.safe_get_full_fp32_param(plain) is None
    assert access.safe_get_full_grad(plain) is None
    assert access.safe_get_local_optimizer_state(plain, "exp_avg") is None


class _Choosing(torch.nn.Module):
    """Each rank uses a layer of its own beside one that all use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.shared, *others = (torch.nn.Linear(5, 5) for _ in range(3))
        self.own = torch.nn.ModuleList(others)
        self.idle = torch.nn.Linear(5, 5)

    def forward(self, x):
        return self.own[dist.get_rank()](self.shared(x)).square().mean()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_gradient_is_the_mean_on_ranks_that_did_not_use_the_parameter(rank, stage):
    model, plain = _Choosing(), _Choosing()
    set_z3_leaf_modules(model, [_Choosing])
    engine = build(stage, model)
    for number in range(2):
        plain.own[number](plain.shared(batch(number))).square().mean().div(2).backward()
    params = dict(engine.module.named_parameters())
    engine.backward(engine(batch(rank)))
    for name, wanted in plain.named_parameters():
        found = access.safe_get_full_grad(params[name])
        product = access.safe_get_full_sensitivity(params[name])
        if wanted.grad is None:
            assert found is None and product is None, name
            continue
        torch.testing.assert_close(found, wanted.grad)
        torch.testing.assert_close(product, (wanted * wanted.grad).abs())
        access.safe_set_full_grad(params[name], found + 1)
    engine.step()
    masters = [access.safe_get_full_fp32_param(parameter) for parameter in params.values()]
    assert same_on_all_ranks([master.tolist() for master in masters])
    moved = [not torch.equal(master, value) for master, value in zip(masters, plain.parameters(), strict=True)]
    assert moved == [not name.startswith("idle") for name in params]


@on_ranks(2)
def test_a_gradient_that_one_rank_sets_is_an_error_where_all_keep_it_whole():
    stage = 0
    engine = build(stage)
    parameter = engine.module.last.bias
    engine.backward(engine(batch(dist.get_rank())))
    before = parameter.detach().clone()
    if dist.get_rank() == 1:
        access.safe_set_full_grad(parameter, torch.ones(3))
    with pytest.raises(DivergenceError, match=r"safe_set_full_grad.*ranks \[0\]"):
        engine.step()
    assert torch.equal(parameter, before)


# ``iter_full`` keeps no values back: what is read of a bucket is yielded before the next one is read.


class _Adapted(nn.Module):
    """A frozen and a trainable layer, as low-rank adapters have: their buckets lie apart."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x):
        return self.trained(self.frozen(x))


@on_ranks(1)
def test_nothing_read_is_kept_back() -> None:
    """Values that had been read and not yielded, at each value of a walk."""
    engine = engine_of(nn.Sequential(*(_Adapted() for _ in range(4))), 3, zero={})
    read: list[str] = []
    walk = whole_buckets._walk

    def counted(*arguments):
        for tile, value in walk(*arguments):
            read.append(tile.name)
            yield tile, value

    whole_buckets._walk = counted
    try:
        kept, yielded = [], 0
        for _ in engine.iter_full("param", bucket_bytes=64):
            yielded += 1
            kept.append(len(read) - yielded)
    finally:
        whole_buckets._walk = walk
    assert yielded == 8
    assert max(kept) == 0, kept
