"""GatheredParameters: what is full inside, what counts afterwards, what moves."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.base.counters import counted
from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.errors import CallOrderError, DeepSpeedConfigError, DivergenceError, ShardedAccessError
from deepspeed.zero.access.gathered import GatheredParameters, by_group
from deepspeed.zero.access.states import safe_get_full_fp32_param
from deepspeed.zero.address import Address
from tests.harness import on_ranks
from tests.harness.logged import logged
from tests.zero.access.support import Model, batch, build, train


def _values(engine):
    return {name: value.clone() for name, value in engine.iter_full("fp32")}


def _is_sharded(parameter):
    return parameter.shape == (0,) and parameter.ds_numel > 0


@on_ranks(2, 3)
def test_full_inside_and_sharded_outside(ranks):
    engine = build(3)
    torch.manual_seed(3)
    plain = dict(Model().named_parameters())
    params = dict(engine.module.named_parameters())
    names = ["blocks.1.rise.weight", "factor", "nothing", "last.bias"]
    if dist.get_rank() == 1:
        names.reverse()  # the order is each rank's own affair
    assert all(_is_sharded(params[name]) for name in names if name != "nothing")
    with counted() as traffic, GatheredParameters(params[name] for name in names):
        for name in names:
            assert type(params[name]) is torch.nn.Parameter
            assert torch.equal(params[name], plain[name]), name
        assert _is_sharded(params["blocks.1.fall.weight"])
        assert traffic.requested["all_gather"].calls == 0
    # Only what was asked for traveled: each rank sent its part of it to every other.
    sent = torch.tensor([traffic.requested["move"].nbytes])
    dist.all_reduce(sent)
    requested = sum(plain[name].numel() for name in names)
    assert sent == requested * 4 * (ranks - 1)
    assert all(_is_sharded(params[name]) for name in names if name != "nothing")
    # A parameter that has a bucket for itself is gathered as one.
    with counted() as traffic, GatheredParameters(params["frozen"]):
        assert torch.equal(params["frozen"], plain["frozen"])
        assert traffic.requested["all_gather"].calls == 1 and not traffic.requested["move"].calls
    assert _is_sharded(params["frozen"])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("stage", "bf16", "modifier"), [(3, True, 0), (3, False, 1), (2, True, 1), (1, False, 0), (0, True, 1)]
)
@on_ranks(2)
def test_the_modifiers_values_count_everywhere(rank, stage, bf16, modifier, whole):
    engine = build(stage, **({"bf16": {"enabled": True}} if bf16 else {}))
    train(engine, rank, 1)
    params = dict(engine.module.named_parameters())
    before = _values(engine)
    names = [n for n in params if n.startswith("blocks.0.")] if whole else ["blocks.0.rise.weight", "last.bias"]
    requested = [params[name] for name in names]
    with GatheredParameters(requested, modifier_rank=modifier), torch.no_grad():
        if rank == modifier:
            params[names[0]][0].fill_(2.5)
            params[names[1]].data[-1] = -1.5
        else:
            params[names[1]].fill_(77)  # of no account
    dtype = requested[0].dtype
    wanted = {name: value.clone() for name, value in before.items()}
    wanted[names[0]][0] = 2.5
    wanted[names[1]][-1] = -1.5
    after = _values(engine)
    for name in wanted:
        # Masters keep their precision wherever nothing was changed.
        assert torch.equal(after[name], wanted[name]), name
    for name, value in engine.iter_full("param"):
        assert torch.equal(value, wanted[name].to(value.dtype)), name
    everywhere = [None, None]
    dist.all_gather_object(everywhere, {n: v.float() for n, v in engine.iter_full("param")})
    assert all(torch.equal(everywhere[0][n], everywhere[1][n]) for n in names)
    train(engine, rank, 1, first=1)
    assert engine(batch(rank, 5, dtype)).isfinite()


@pytest.mark.parametrize(
    ("ranks", "threshold", "bf16"), [(2, 0, False), (2, 0, True), (2, 100_000, False), (1, 0, False), (1, 0, True)]
)
@on_ranks()
def test_edits_without_a_modifier_are_dropped_with_one_line(ranks, threshold, bf16):
    engine = build(3, zero={"stage3_param_persistence_threshold": threshold}, **({"bf16": {"enabled": bf16}}))
    params = dict(engine.module.named_parameters())
    before = _values(engine)
    with logged() as lines:
        for _ in range(2):  # the second time without a line
            with GatheredParameters(params["blocks.0.rise.weight"]), torch.no_grad():
                params["blocks.0.rise.weight"].mul_(3)
        with GatheredParameters([params["first.bias"], params["last.bias"]]):
            params["first.bias"].data.add_(1)  # unseen by version counters
        with GatheredParameters(params.values()), torch.no_grad():
            params["last.weight"].zero_()
        with GatheredParameters(params["frozen"]):
            params["frozen"].sum()
    after = _values(engine)
    for name in before:
        assert torch.equal(before[name], after[name]), name
    with GatheredParameters(list(params.values())):
        assert torch.equal(params["last.weight"].float(), before["last.weight"].to(params["last.weight"].dtype).float())
    notices = [line for line in lines if "modifier_rank is None" in line]
    found = [next(name for name in params if f"'{name}'" in line) for line in notices]
    assert found[0] == "blocks.0.rise.weight" and found.count("blocks.0.rise.weight") == 1
    assert "frozen" not in found
    if ranks == 1 or threshold:
        assert found == ["blocks.0.rise.weight", "first.bias", "last.weight"]
    train(engine, dist.get_rank(), 1)


@on_ranks(1, 2)
def test_empty_full_disabled_foreign_and_nested(ranks):
    engine = build(3)
    params = dict(engine.module.named_parameters())
    weight = params["blocks.0.rise.weight"]
    buffer, stranger = torch.ones(3), torch.nn.Parameter(torch.ones(2))
    with counted() as traffic:
        for nothing in ([], (), iter(()), None, [buffer], [stranger, None], set()):
            with GatheredParameters(nothing, modifier_rank=None):
                pass
            with GatheredParameters(nothing, modifier_rank=0):
                pass
        with GatheredParameters(weight, modifier_rank=0, enabled=False):
            assert ranks == 1 or _is_sharded(weight)
        assert not traffic.requested and not traffic.ran
    with GatheredParameters([weight, buffer, None, weight, stranger, weight], modifier_rank=0), torch.no_grad():
        weight.fill_(4)
        stranger.fill_(5)
    assert stranger.tolist() == [5, 5]
    with GatheredParameters(weight):
        assert weight.eq(4).all() and weight.shape == (15, 7)
        with counted() as traffic, GatheredParameters([weight]):  # full already: nothing to do
            assert weight.eq(4).all()
        assert not traffic.requested
        assert weight.eq(4).all() and weight.shape == (15, 7)
        with GatheredParameters([weight, params["last.bias"]], modifier_rank=ranks - 1), torch.no_grad():
            if dist.get_rank() == ranks - 1:
                weight.fill_(6)
                params["last.bias"].fill_(7)
        assert weight.eq(6).all()  # the inner block published it to the outer one
    assert ranks == 1 or _is_sharded(weight)
    assert safe_get_full_fp32_param(weight).eq(6).all()
    assert safe_get_full_fp32_param(params["last.bias"]).eq(7).all()
    with pytest.raises(DeepSpeedConfigError, match="modifier_rank=5"):
        GatheredParameters(weight, modifier_rank=5).__enter__()
    with pytest.raises(DeepSpeedConfigError, match="str"):
        GatheredParameters(["first.weight"])


@on_ranks(2)
def test_a_parameter_is_full_until_the_last_block_that_holds_it_ends(rank):
    """The same parameters in two blocks, which end in either order; and one block that is entered twice."""
    with logged() as texts:
        for engine in (build(3), build(3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 10**6})):
            params = dict(engine.module.named_parameters())
            weight, bias, alone = params["blocks.0.rise.weight"], params["last.bias"], params["frozen"]
            is_resident = not _is_sharded(weight)
            for modifier, one, other in (
                (None, [weight], [weight]), (1, [weight], [weight]), (1, [weight, bias], [alone, weight]),
                (0, [alone, weight], [weight, bias]), (1, [*params.values()], [weight]), (0, [weight], params.values()),
            ):  # fmt: skip
                first = GatheredParameters(one)
                for second in (GatheredParameters(other, modifier_rank=modifier), first):
                    for ends in ((second, first), (first, second)):
                        before = _values(engine)["blocks.0.rise.weight"]
                        is_changed = modifier is not None and second is not first
                        first.__enter__()
                        second.__enter__()
                        if is_changed and rank == modifier:
                            weight.data.add_(1)
                        ends[0].__exit__(None, None, None)
                        assert weight.shape == (15, 7)
                        ends[1].__exit__(None, None, None)
                        assert is_resident or _is_sharded(weight)
                        after = _values(engine)["blocks.0.rise.weight"]
                        assert torch.equal(after, before + is_changed), (
                            is_resident,
                            modifier,
                            len(one),
                            second is first,
                        )
            train(engine, rank, 1)
    assert not [text for text in texts if "is dropped" in text], texts


@on_ranks(2)
def test_attributes_survive():
    engine = build(3)
    weight = dict(engine.module.named_parameters())["blocks.0.rise.weight"]
    weight._is_hf_initialized = True
    with GatheredParameters(weight, modifier_rank=0):
        assert weight._is_hf_initialized
        weight.another = "kept"
    assert weight._is_hf_initialized and weight.another == "kept"
    with pytest.raises(ShardedAccessError):
        weight.sum()


@on_ranks(2)
def test_a_gathered_model_runs_without_gathers(rank):
    engine = build(3)
    with torch.no_grad():
        wanted = engine.module(batch(rank)).item()
    with GatheredParameters(engine.parameters()):
        with counted() as traffic, torch.no_grad():
            for _ in range(3):
                assert engine.module(batch(rank)).item() == wanted
        assert traffic.requested["all_gather"].calls == 0
        assert all(p.shape == p.ds_shape for p in engine.parameters())
        with pytest.raises(CallOrderError, match="GatheredParameters"):
            engine.backward(engine(batch(rank)))
            engine.step()
    engine.zero_grad()
    assert all(bucket.state.value == "sharded" for bucket in engine._runtime.buckets)
    train(engine, rank, 2)


@on_ranks(2)
def test_forward_inside_a_block_and_a_block_inside_a_forward(rank):
    engine = build(3)
    weight = dict(engine.module.named_parameters())["blocks.1.fall.weight"]
    plain = engine(batch(rank)).item()
    with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.mul_(2)
        changed = engine(batch(rank)).item()  # a forward gathers the rest of the bucket and sees the edit
        assert changed != plain
    assert engine(batch(rank)).item() == changed
    train(engine, rank, 1)
    # A block inside a forward: the parameters of the running unit are here anyway.
    seen = []

    def look(module, inputs):
        with GatheredParameters(list(module.parameters())):
            seen.append(module.rise.weight.shape)

    engine.module.blocks[1].register_forward_pre_hook(look)
    train(engine, rank, 2, first=1)
    assert seen == [(15, 7)] * 2


@pytest.mark.parametrize("kind", ["names", "sizes", "modifier", "one rank"])
@on_ranks(2)
def test_ranks_that_request_different_things_all_raise(rank, kind):
    engine = build(3)
    params = dict(engine.module.named_parameters())
    names = {"names": ["first.weight", "last.weight"], "sizes": ["first.weight", "factor"]}.get(kind)
    with pytest.raises(DivergenceError) as caught:
        if kind == "modifier":
            with GatheredParameters(params["first.weight"], modifier_rank=rank):
                pass
        elif kind == "one rank":
            if rank == 0:
                with GatheredParameters(params["first.weight"]):
                    pass
            else:
                engine(batch(rank))
        else:
            with GatheredParameters(params[names[rank]]):
                pass
    message = str(caught.value)
    assert "GatheredParameters" in message and "first.weight" in message


@on_ranks(2)
def test_an_exception_inside_drops_edits_on_all_ranks(rank):
    engine = build(3)
    weight = dict(engine.module.named_parameters())["first.weight"]
    before = safe_get_full_fp32_param(weight)
    with pytest.raises(ZeroDivisionError if rank == 1 else CallOrderError, match="zero|rank 1 left the block"):
        with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.fill_(9)
            if rank == 1:
                raise ZeroDivisionError("division by zero")
    assert torch.equal(safe_get_full_fp32_param(weight), before)
    with pytest.raises(CallOrderError, match="another shape"):
        with GatheredParameters(weight, modifier_rank=0):
            weight.data = torch.zeros(2, 2)
    assert torch.equal(safe_get_full_fp32_param(weight), before)
    with GatheredParameters(weight, modifier_rank=0):
        weight.data = torch.full((7, 5), 3.0)  # other storage, same shape
    assert safe_get_full_fp32_param(weight).eq(3).all()
    train(engine, rank, 1)


@on_ranks(2)
def test_parameters_of_two_engines_in_one_block(rank):
    policy, target = build(3, seed=3), build(3, seed=4)
    pairs = list(zip(policy.module.parameters(), target.module.parameters(), strict=True))
    with GatheredParameters([p for pair in pairs for p in pair], modifier_rank=0):
        if rank == 0:
            for source, copy in pairs:
                copy.data.copy_(source.data)
    theirs = dict(target.iter_full("fp32"))
    for name, value in policy.iter_full("fp32"):
        assert torch.equal(value, theirs[name])


@on_ranks(2)
def test_an_exception_drops_the_edits_of_both_engines_on_all_ranks():
    engines = [build(3), build(3)]
    weights = [dict(engine.module.named_parameters())["first.weight"] for engine in engines]
    before = [safe_get_full_fp32_param(weight) for weight in weights]
    rank = dist.get_rank()
    with pytest.raises(ZeroDivisionError if rank == 1 else CallOrderError, match="zero|rank 1 left the block"):
        with GatheredParameters(weights, modifier_rank=0), torch.no_grad():
            for weight in weights:
                weight.fill_(9)
            if rank == 1:
                raise ZeroDivisionError("division by zero")
    assert all(map(_is_sharded, weights))
    for engine, weight, value in zip(engines, weights, before, strict=True):
        assert torch.equal(safe_get_full_fp32_param(weight), value)
        train(engine, rank, 1)


def test_groups_of_equal_size_have_one_order_on_every_rank():
    """Rank 0 shares one parameter with rank 1 and one with rank 2; a caller may name them in either order."""
    entries = []
    for name, ranks in (("far", (0, 2)), ("near", (0, 1)), ("data", (0, 3)), ("data", (0, 1))):
        transport = LocalTransport()
        transport.ranks = ranks
        group = SimpleNamespace(name=name)
        bucket = SimpleNamespace(transport=transport, group=group, layout=SimpleNamespace(index=0))
        entries.append((torch.nn.Parameter(torch.zeros(1)), Address(bucket, 0, 0)))
    orders = [[found[0][1].bucket.transport for found in by_group(requested)] for requested in (entries, entries[::-1])]
    assert orders[0] == orders[1]
    assert [found.ranks for found in orders[0]] == [(0, 1), (0, 3), (0, 2), (0, 1)]
