"""What forwards and backwards gather and free (``zero.gather.hooks``), on ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.zero.address import State
from deepspeed.zero.gather.schedule import GatherLimits
from tests.harness.loopback import LoopbackTransport, run_threads
from tests.zero.alone import Rank, Stack, batch, rank_of, stack

KEEPING = GatherLimits(prefetch=10**6, max_live=10**6, max_reuse_distance=10**6)


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
def test_values_and_gradients_are_those_of_plain_torch(limits: GatherLimits | None) -> None:
    def body(transport: LoopbackTransport) -> None:
        rank = rank_of(transport, 3, gathers=limits)
        for step in range(3):
            loss = rank.model(batch(step, transport.rank))
            assert loss.item() == pytest.approx(stack()(batch(step, transport.rank)).item(), rel=1e-6)
            assert set(states(rank)) == ({"S"} if limits is None else {"F"})
            found = gradients(rank, loss)
            assert set(states(rank)) == {"S"}
            check(found, expected_gradients(rank, lambda model, n, step=step: model(batch(step, n))))
            rank.reducer.clear()

    run_threads(body, 2)


def test_only_the_running_unit_is_gathered() -> None:
    def body(transport: LoopbackTransport) -> None:
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

    run_threads(body, 2)


def test_an_evaluation_keeps_nothing() -> None:
    def body(transport: LoopbackTransport) -> None:
        rank = rank_of(transport, 3, gathers=KEEPING)
        with torch.no_grad():
            for _ in range(2):
                rank.model(batch(0))
                assert states(rank) == "SSSS"
        rank.model(batch(0))
        assert states(rank) == "FFFF" and all(bucket.is_kept for bucket in rank.runtime.buckets)
        rank.runtime.free_gathered()
        assert states(rank) == "SSSS"

    run_threads(body, 2)


def test_what_one_forward_keeps_is_freed_unit_by_unit_in_its_backward() -> None:
    def body(transport: LoopbackTransport) -> None:
        rank = rank_of(transport, 3, gathers=KEEPING)
        gathered: list[int] = []
        for parameter in rank.model.parameters():
            parameter.register_hook(lambda _: gathered.append(states(rank).count("F")))
        for _ in range(2):  # in the first, nothing is reduced before the order is known
            gathered.clear()
            rank.backward(rank.model(batch(0)))
            rank.reducer.clear()
        assert gathered[0] == 4 and gathered[-1] < 4

    run_threads(body, 2)


def test_two_forwards_before_their_backwards() -> None:
    def body(transport: LoopbackTransport) -> None:
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

    run_threads(body, 2)


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


def test_a_block_that_is_left_out_has_no_gradient_and_is_not_gathered() -> None:
    def body(transport: LoopbackTransport) -> None:
        rank = rank_of(transport, 3)
        for _ in range(2):
            loss = rank.model(batch(0, transport.rank), skip=[1])
            found = gradients(rank, loss)
            assert rank.reducer.buckets[1].used == [False] * 4
            check(found, expected_gradients(rank, lambda model, n: model(batch(0, n), skip=[1])))
            rank.reducer.clear()
        gathers = [label for operation, label in transport.network.log[transport.rank] if operation == "all_gather"]
        assert gathers and not any("blocks.1" in label for label in gathers)

    run_threads(body, 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks(reentrant: bool) -> None:
    class Recomputing(Stack):
        def forward(self, x: torch.Tensor, skip: Any = ()) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x).square().mean()

    def run(model: nn.Module, n: int) -> torch.Tensor:
        return model(batch(0, n).requires_grad_())

    def body(transport: LoopbackTransport) -> None:
        model = Recomputing()
        model.load_state_dict(stack().state_dict())
        rank = rank_of(transport, 3, model)
        for _ in range(2):
            found = gradients(rank, run(model, transport.rank))
            assert states(rank) == "SSSS"
            check(found, expected_gradients(rank, run))
            rank.reducer.clear()

    run_threads(body, 2)


def test_a_parameter_that_another_module_uses() -> None:
    class Borrowing(Stack):
        def forward(self, x: torch.Tensor, skip: Any = ()) -> torch.Tensor:
            loss = super().forward(x, skip)
            return loss + (self.blocks[0].up.weight * 0.5).square().sum()

    def body(transport: LoopbackTransport) -> None:
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

    run_threads(body, 2)


def test_modules_that_are_called_by_themselves() -> None:
    def body(transport: LoopbackTransport) -> None:
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

    run_threads(body, 2)


def test_an_exception_in_a_forward_or_backward_leaves_nothing_open() -> None:
    def body(transport: LoopbackTransport) -> None:
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
                assert not rank.runtime.drop_open_work() and not rank.runtime.hooks.in_forward
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

    run_threads(body, 2)


def test_a_pause_frees_what_the_running_forward_holds() -> None:
    def body(transport: LoopbackTransport) -> None:
        rank = rank_of(transport, 3)
        model, seen = rank.model, []
        assert isinstance(model, Stack)

        def pausing(*_: Any) -> None:
            assert rank.runtime.hooks.in_forward
            rank.runtime.hooks.pause()
            seen.append(states(rank))
            assert not rank.runtime.hooks.in_forward

        handle = model.blocks[1].register_forward_hook(pausing)
        loss = model(batch(0, transport.rank))
        assert seen == ["SSSS"] and states(rank) == "SSSS"
        assert loss.item() == pytest.approx(stack()(batch(0, transport.rank)).item(), rel=1e-6)
        handle.remove()
        check(gradients(rank, loss), expected_gradients(rank, lambda model, n: model(batch(0, n))))

    run_threads(body, 2)


def test_frozen_buckets_are_freed_in_a_backward_too() -> None:
    def body(transport: LoopbackTransport) -> None:
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

    run_threads(body, 2)


def test_a_copy_of_the_model_is_not_the_engines() -> None:
    def body(transport: LoopbackTransport) -> None:
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

    run_threads(body, 2)


def test_close_takes_every_hook_from_the_model() -> None:
    def body(transport: LoopbackTransport) -> None:
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

    run_threads(body, 2)
