"""What forwards and backwards gather and free (``zero.gather.hooks``), on ranks that are threads."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import NotYetSupportedError
from deepspeed.zero.address import State
from deepspeed.zero.gather import hooks
from deepspeed.zero.gather.agreement import Agreement
from deepspeed.zero.gather.hooks import ForwardHooks, tensors_in
from deepspeed.zero.gather.schedule import GatherLimits, GatherSchedule
from deepspeed.zero.passes import ModelPhase, Pass, PassTracker
from tests.harness import on_threads
from tests.harness.loopback import LoopbackTransport, run_threads
from tests.zero.alone import Block, Rank, Stack, batch, bucket_of, rank_of, stack

AT_ONCE = GatherLimits(prefetch=0, max_live=0, max_reuse_distance=0)  # nothing ahead, nothing kept
KEEPING = GatherLimits(prefetch=10**6, max_live=10**6, max_reuse_distance=10**6)


class Hooked:
    """A module whose blocks and linear layers are sharded units with :class:`ForwardHooks`, without a runtime.

    Attributes:
        entries: Numbers of the modules whose training forwards have returned.
    """

    def __init__(self, transport: LoopbackTransport, model: nn.Module, limits: GatherLimits = AT_ONCE) -> None:
        units = [module for module in model.modules() if isinstance(module, Block)]
        inner = {layer for unit in units for layer in unit.modules()}
        units += [module for module in model.modules() if isinstance(module, nn.Linear) and module not in inner]
        self.buckets = [
            bucket_of(transport, list(unit.parameters()), index=number) for number, unit in enumerate(units)
        ]
        agreement = Agreement(transport, [f"bucket {number}" for number in range(9)])
        self.passes = PassTracker()
        self.schedule = GatherSchedule(self.buckets, self.passes, agreement, limits)
        self.entries: list[int] = []
        self.hooks = ForwardHooks(
            model,
            [(unit, [bucket]) for unit, bucket in zip(units, self.buckets, strict=True)],
            self.buckets,
            self.schedule,
            self.passes,
        )
        self.hooks.watch = lambda _outputs, entry: self.entries.append(entry)  # type: ignore[method-assign, assignment, misc]

    def begin_backward(self) -> Pass:
        now = self.passes.begin(ModelPhase.BACKWARD)
        self.schedule.begin(now)
        return now

    def end_backward(self, now: Pass) -> None:
        self.schedule.end(now)
        self.hooks.end_backward(now)
        self.passes.end()

    @property
    def in_forward(self) -> bool:
        """Whether a forward is running that is not paused."""
        return bool(self.passes.scopes)

    @property
    def states(self) -> str:
        """Of the buckets: S, G or F."""
        return "".join(bucket.state.value[0].upper() for bucket in self.buckets)

    @property
    def users(self) -> list[int]:
        """How many running forwards use each bucket."""
        return [bucket.users for bucket in self.buckets]


@on_threads(2)
def test_a_training_forward_reports_the_number_of_its_outermost_module(transport: LoopbackTransport) -> None:
    model = nn.Sequential(stack(1), nn.Identity())
    hooked = Hooked(transport, model)  # units: 1 (the block), 2 (the head); then the stack, which is above them
    inner = model[0]
    model(batch(0))
    inner.blocks[0](batch(0))
    inner.head(batch(0))
    inner(batch(0))
    model[1](batch(0))
    assert hooked.entries == [0, 1, 2, 3]
    with torch.no_grad():
        model(batch(0))
    assert hooked.entries == [0, 1, 2, 3] and hooked.states == "SS"


@on_threads(2)
def test_each_running_forward_of_a_unit_is_a_user_of_its_bucket(transport: LoopbackTransport) -> None:
    model = stack()
    hooked, seen = Hooked(transport, model), []
    for module in (model.blocks[0].up, model.blocks[2].down, model.head):
        module.register_forward_pre_hook(lambda *_: seen.append((hooked.users, hooked.states)))
    model(batch(0))
    assert seen == [([1, 0, 0, 0], "FSSS"), ([0, 0, 1, 0], "SSFS"), ([0, 0, 0, 1], "SSSF")]
    assert hooked.users == [0] * 4 and hooked.states == "SSSS"


@on_threads(2)
def test_a_use_outside_the_own_module_lasts_as_long_as_the_scope_around_it(transport: LoopbackTransport) -> None:
    model = stack()
    hooked, seen = Hooked(transport, model), []

    def borrow(*_: Any) -> None:
        seen.append(model.head.weight.sum().item())
        seen.append(hooked.users)

    model.blocks[0].up.register_forward_hook(borrow)
    model(batch(0))
    assert seen == [pytest.approx(stack().head.weight.sum().item()), [1, 0, 0, 1]]
    assert hooked.users == [0] * 4 and hooked.states == "SSSS"


@on_threads(2)
def test_a_paused_forward_is_resumed_by_the_next_gather(transport: LoopbackTransport) -> None:
    model = stack()
    hooked, seen = Hooked(transport, model), []

    def pause(*_: Any) -> None:
        hooked.hooks.pause()
        seen.append((hooked.in_forward, hooked.users, hooked.states))

    model.blocks[0].up.register_forward_hook(pause)
    model.blocks[0].down.register_forward_pre_hook(lambda *_: seen.append(hooked.in_forward))
    model.blocks[0].down.register_forward_hook(lambda *_: seen.append((hooked.in_forward, hooked.states)))
    loss = model(batch(0))
    assert loss.item() == pytest.approx(stack()(batch(0)).item(), rel=1e-6)
    assert seen == [(False, [0] * 4, "SSSS"), False, (True, "FSSS")]
    assert hooked.states == "SSSS" and hooked.users == [0] * 4


@on_threads(2)
def test_the_end_of_a_backward_frees_what_no_other_forward_waits_for(transport: LoopbackTransport) -> None:
    model = stack()
    hooked = Hooked(transport, model, KEEPING)
    for block in model.blocks[:2]:
        block(batch(0))
    assert hooked.entries == [1, 2] and hooked.states == "FFSS"
    now = hooked.begin_backward()
    now.reached.add(1)
    hooked.end_backward(now)
    assert hooked.states == "SFSS"
    hooked.end_backward(hooked.begin_backward())  # one that has come through the outputs of no forward
    assert hooked.states == "SSSS"


@on_threads(2)
def test_a_bucket_is_freed_in_backward_once_its_gradients_are_in(transport: LoopbackTransport) -> None:
    model = stack()
    hooked = Hooked(transport, model, KEEPING)
    model(batch(0))
    hooked.begin_backward()
    first, second = hooked.buckets[:2]
    hooked.passes.note_gradients(first)
    assert hooked.states == "FFFF"  # its gradients are missing
    first.gradients_in = True
    hooked.passes.note_gradients(first)
    assert hooked.states == "SFFF"
    second.gradients_in = True
    second.users += 1
    hooked.passes.note_gradients(second)
    assert hooked.states == "SFFF"  # a scope uses it
    hooked.hooks.abandon()
    assert hooked.states == "SSSS" and hooked.users == [0] * 4


@on_threads(1)
def test_pickles_of_a_module_have_idle_hooks(transport: LoopbackTransport) -> None:
    model = nn.Sequential(stack(1))
    hooked = Hooked(transport, model)
    read = pickle.loads(pickle.dumps(list(model._forward_pre_hooks.values())))
    assert len(read) == 1 and read[0](model, (batch(0),)) is None
    assert not hooked.in_forward
    model._forward_pre_hooks.copy().popitem()[1](model, (batch(0),))
    assert hooked.in_forward
    hooked.hooks.abandon()


def test_transforms_that_differentiate_are_refused_where_parameters_are_sharded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hooks, "differentiates_a_function", lambda: True)

    def body(transport: LoopbackTransport) -> None:
        model = stack()
        hooked = Hooked(transport, model)
        with pytest.raises(NotYetSupportedError, match="cannot run the modules of a model at ZeRO stage 3"):
            model(batch(0))
        assert not hooked.in_forward and hooked.states == "SSSS"
        bare = ForwardHooks(nn.Linear(8, 1), [], [], hooked.schedule, hooked.passes)
        bare.refuse_transforms()
        assert not bare.handles and not bare.sees_forwards

    run_threads(body, 1)


def test_tensors_are_found_once_in_any_nesting() -> None:
    @dataclass
    class Output:
        logits: torch.Tensor
        rest: Any

    tensors = [torch.full((1,), float(number)) for number in range(5)]
    inner: dict[str, Any] = {"a": tensors[0], "b": (tensors[1], "text", 3, None)}
    inner["itself"] = inner
    value = [Output(tensors[2], {1}), inner, SimpleNamespace(x=[tensors[3]]), inner, nn.Linear(1, 1), torch.Tensor]
    found = sorted(tensor.item() for tensor in tensors_in(value))
    assert found == [0.0, 1.0, 2.0, 3.0]
    assert [tensor is tensors[4] for tensor in tensors_in(tensors[4])] == [True]


def states(rank: Rank) -> str:
    """Of its sharded buckets: S, G or F."""
    return "".join(bucket.state.value[0].upper() for bucket in rank.runtime.buckets)


def gradients(rank: Rank, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a backward leaves at this rank's slices, by the label of the bucket."""
    rank.backward(loss)
    return {one.bucket.label: one.result.clone() for one in rank.reducer.buckets if one.result is not None}


def expected_gradients(rank: Rank, run: Callable[[nn.Module, int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same from plain torch."""
    plain = stack()
    for number in range(rank.transport.size):
        (run(plain, number) / rank.transport.size).backward()
    found = {}
    for one in rank.reducer.buckets:
        layout = one.bucket.layout
        flat = torch.zeros(layout.numel)
        for tile, start in zip(layout.tiles, layout.starts, strict=True):
            grad = plain.get_parameter(tile.name).grad
            if grad is not None:
                flat[start : start + tile.numel] = grad.reshape(-1)
        found[one.bucket.label] = rank.transport.my_slice(flat)
    return found


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("limits", [None, KEEPING])
@on_threads(2)
def test_values_and_gradients_are_those_of_plain_torch(
    transport: LoopbackTransport, limits: GatherLimits | None
) -> None:
    rank = rank_of(transport, 3, gathers=limits)
    for step in range(3):
        loss = rank.model(batch(step, transport.rank))
        assert loss.item() == pytest.approx(stack()(batch(step, transport.rank)).item(), rel=1e-6)
        assert set(states(rank)) == ({"S"} if limits is None else {"F"})
        found = gradients(rank, loss)
        assert set(states(rank)) == {"S"}
        check(found, expected_gradients(rank, lambda model, n, step=step: model(batch(step, n))))
        rank.reducer.clear()


@on_threads(2)
def test_only_the_running_unit_is_gathered(transport: LoopbackTransport) -> None:
    rank = rank_of(transport, 3)
    model = rank.model
    assert isinstance(model, Stack)
    seen: list[str] = []
    for block in (*model.blocks, model.head):
        block.register_forward_pre_hook(lambda *_: seen.append(states(rank)))
    loss = model(batch(0))
    assert seen == ["FSSS", "SFSS", "SSFS", "SSSF"]
    assert states(rank) == "SSSS" and all(parameter.numel() == 0 for parameter in model.parameters())
    most: list[int] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: most.append(states(rank).count("F")))
    rank.backward(loss)
    assert max(most) == 4 and states(rank) == "SSSS"  # nothing is reduced before the order is known
    rank.reducer.clear()
    loss = model(batch(0))
    most.clear()
    rank.backward(loss)
    assert max(most) <= 2 and states(rank) == "SSSS"


@on_threads(2)
def test_an_evaluation_keeps_nothing(transport: LoopbackTransport) -> None:
    rank = rank_of(transport, 3, gathers=KEEPING)
    with torch.no_grad():
        for _ in range(2):
            rank.model(batch(0))
            assert states(rank) == "SSSS"
    rank.model(batch(0))
    assert states(rank) == "FFFF" and all(bucket.is_kept for bucket in rank.runtime.buckets)
    rank.runtime.free_gathered()
    assert states(rank) == "SSSS"


@on_threads(2)
def test_what_one_forward_keeps_is_freed_unit_by_unit_in_its_backward(transport: LoopbackTransport) -> None:
    rank = rank_of(transport, 3, gathers=KEEPING)
    gathered: list[int] = []
    for parameter in rank.model.parameters():
        parameter.register_hook(lambda _: gathered.append(states(rank).count("F")))
    for _ in range(2):  # in the first, nothing is reduced before the order is known
        gathered.clear()
        rank.backward(rank.model(batch(0)))
        rank.reducer.clear()
    assert gathered[0] == 4 and gathered[-1] < 4


@on_threads(2)
def test_two_forwards_before_their_backwards(transport: LoopbackTransport) -> None:
    for limits in (None, KEEPING):
        rank = rank_of(transport, 3, gathers=limits, micro_batches=2, policy={"every_micro_batch": True})
        losses = [rank.model(batch(0, transport.rank)), rank.model(batch(1, transport.rank))]
        rank.backward(losses[1], 0)
        if limits is not None:
            assert "F" in states(rank)  # which the other forward continues needing
        rank.backward(losses[0], 1)
        assert states(rank) == "SSSS"
        found = {one.bucket.label: one.result for one in rank.reducer.buckets}
        check(found, expected_gradients(rank, lambda model, n: model(batch(0, n)) + model(batch(1, n))))


def test_ranks_keep_alike_what_only_some_of_them_still_use() -> None:
    def second(model: nn.Module, rank: int) -> torch.Tensor:
        return model(batch(1, rank), skip=[1] if rank else [])

    def body(transport: LoopbackTransport) -> str:
        rank = rank_of(transport, 3, gathers=KEEPING, micro_batches=2)
        first = rank.model(batch(0, transport.rank))
        last = second(rank.model, transport.rank)
        rank.backward(first, 0)
        between = states(rank)
        rank.backward(last, 1)
        found = {one.bucket.label: one.result for one in rank.reducer.buckets}
        check(found, expected_gradients(rank, lambda model, n: model(batch(0, n)) + second(model, n)))
        return between + states(rank)

    assert run_threads(body, 2) == ["FFFFSSSS"] * 2


@on_threads(2)
def test_a_block_that_is_left_out_has_no_gradient_and_is_not_gathered(transport: LoopbackTransport) -> None:
    rank = rank_of(transport, 3)
    for _ in range(2):
        loss = rank.model(batch(0, transport.rank), skip=[1])
        found = gradients(rank, loss)
        assert rank.reducer.buckets[1].used == [False] * 4
        check(found, expected_gradients(rank, lambda model, n: model(batch(0, n), skip=[1])))
        rank.reducer.clear()
    gathers = [label for operation, label in transport.network.log[transport.rank] if operation == "all_gather"]
    assert gathers and not any("blocks.1" in label for label in gathers)


@pytest.mark.parametrize("reentrant", [False, True])
@on_threads(2)
def test_recomputed_blocks(transport: LoopbackTransport, reentrant: bool) -> None:
    class Recomputing(Stack):
        def forward(self, x: torch.Tensor, skip: Any = ()) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x).square().mean()

    def run(model: nn.Module, n: int) -> torch.Tensor:
        return model(batch(0, n).requires_grad_())

    model = Recomputing()
    model.load_state_dict(stack().state_dict())
    rank = rank_of(transport, 3, model)
    for _ in range(2):
        found = gradients(rank, run(model, transport.rank))
        assert states(rank) == "SSSS"
        check(found, expected_gradients(rank, run))
        rank.reducer.clear()


@on_threads(2)
def test_a_parameter_that_another_module_uses(transport: LoopbackTransport) -> None:
    class Borrowing(Stack):
        def forward(self, x: torch.Tensor, skip: Any = ()) -> torch.Tensor:
            loss = super().forward(x, skip)
            return loss + (self.blocks[0].up.weight * 0.5).square().sum()

    model, plain = Borrowing(), Borrowing()
    model.load_state_dict(stack().state_dict())
    plain.load_state_dict(stack().state_dict())
    rank = rank_of(transport, 3, model)
    loss = model(batch(0))
    assert loss.item() == pytest.approx(plain(batch(0)).item(), rel=1e-6)
    assert states(rank) == "SSSS"
    found = gradients(rank, loss)
    extra = torch.zeros(rank.runtime.buckets[0].layout.numel)
    extra[: 16 * 8] = (0.5 * stack().blocks[0].up.weight).reshape(-1).detach()
    expected = expected_gradients(rank, lambda model, n: model(batch(0)))
    label = rank.runtime.buckets[0].label
    start = rank.runtime.buckets[0].layout.starts[
        [tile.name for tile in rank.runtime.buckets[0].layout.tiles].index("blocks.0.up.weight")
    ]
    expected[label] += transport.my_slice(extra.roll(start))
    check(found, expected)


@on_threads(2)
def test_modules_that_are_called_by_themselves(transport: LoopbackTransport) -> None:
    rank = rank_of(transport, 3)
    model = rank.model
    assert isinstance(model, Stack)
    for _ in range(2):
        hidden = model.blocks[1](batch(0))
        torch.testing.assert_close(hidden, stack().blocks[1](batch(0)))
        assert states(rank) == "SSSS"
        rank.backward(hidden.square().sum())
        used = [any(one.used) for one in rank.reducer.buckets]
        assert used == [False, True, False, False] and states(rank) == "SSSS"
        rank.reducer.clear()


@on_threads(2)
def test_an_exception_in_a_forward_or_backward_leaves_nothing_open(transport: LoopbackTransport) -> None:
    for limits in (None, KEEPING):
        rank = rank_of(transport, 3, gathers=limits)
        model, fails = rank.model, [True]
        assert isinstance(model, Stack)

        def failing(*_: Any, fails: list[bool] = fails) -> None:
            if fails[0]:
                raise ArithmeticError

        handle = model.blocks[1].down.register_forward_hook(failing)
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                model(batch(0))
            assert not rank.runtime.drop_open_work() and not rank.runtime.passes.scopes
            assert states(rank) == ("SSSS" if limits is None else "FFSS")
        handle.remove()
        loss = model(batch(0, transport.rank))
        hook = model.blocks[1].register_full_backward_pre_hook(failing)
        loss = model(batch(0, transport.rank))
        with pytest.raises(ArithmeticError):
            rank.backward(loss)
        rank.runtime.drop_open_work()
        hook.remove()
        assert states(rank) == "SSSS" and all(bucket.users == 0 for bucket in rank.runtime.buckets)
        fails[0] = False
        found = gradients(rank, model(batch(0, transport.rank)))
        check(found, expected_gradients(rank, lambda model, n: model(batch(0, n))))


@on_threads(2)
def test_a_pause_frees_what_the_running_forward_holds(transport: LoopbackTransport) -> None:
    rank = rank_of(transport, 3)
    model, seen = rank.model, []
    assert isinstance(model, Stack)

    def pausing(*_: Any) -> None:
        assert rank.runtime.passes.scopes
        rank.runtime.hooks.pause()
        seen.append(states(rank))
        assert not rank.runtime.passes.scopes

    handle = model.blocks[1].register_forward_hook(pausing)
    loss = model(batch(0, transport.rank))
    assert seen == ["SSSS"] and states(rank) == "SSSS"
    assert loss.item() == pytest.approx(stack()(batch(0, transport.rank)).item(), rel=1e-6)
    handle.remove()
    check(gradients(rank, loss), expected_gradients(rank, lambda model, n: model(batch(0, n))))


@on_threads(2)
def test_frozen_buckets_are_freed_in_a_backward_too(transport: LoopbackTransport) -> None:
    model = stack()
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    rank = rank_of(transport, 3, model)
    loss = model(batch(0, transport.rank).requires_grad_())
    seen: list[str] = []
    model.blocks[0].up.weight.register_hook(lambda grad: seen.append(states(rank)))
    rank.backward(loss)
    assert len(seen) == 1 and seen[0][1] == "S"
    assert len(rank.reducer.buckets) == 3


@on_threads(2)
def test_a_copy_of_the_model_is_not_the_engines(transport: LoopbackTransport) -> None:
    rank = rank_of(transport, 3)
    bucket = rank.runtime.buckets[0]
    module = rank.model.blocks[0]  # type: ignore[index, union-attr]
    bucket.start_gather()
    bucket.finish_gather()
    twin = copy.deepcopy(module)
    bucket.reshard()
    before = len(transport.network.log[transport.rank])
    torch.testing.assert_close(twin(batch(0)), stack().blocks[0](batch(0)))
    assert len(transport.network.log[transport.rank]) == before and bucket.state is State.SHARDED


@on_threads(2)
def test_close_takes_every_hook_from_the_model(transport: LoopbackTransport) -> None:
    rank = rank_of(transport, 3)
    hooks = rank.runtime.hooks
    assert hooks.sees_forwards and hooks.handles
    hooks.close()
    modules = list(rank.model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)
    hooks.install()
    counted = sum(len(module._forward_pre_hooks) for module in modules)
    hooks.install()
    assert sum(len(module._forward_pre_hooks) for module in modules) == counted > 0
