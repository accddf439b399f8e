"""The life of one bucket (``zero.bucket``), on ranks that are threads."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.errors import CallOrderError
from deepspeed.zero.address import State
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.gather.schedule import GatherCount
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import MemoryTracker, StorageKind
from tests.harness import on_threads
from tests.harness.loopback import LoopbackTransport, run_threads
from tests.zero.alone import bucket_of

SHAPES = [(3, 5), (7,), (4, 11, 3)]


def params(seed: int = 0) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=random)) for shape in SHAPES]


def gathered(bucket: Bucket) -> Bucket:
    bucket.start_gather()
    bucket.finish_gather()
    return bucket


@on_threads(3)
def test_a_gather_brings_the_values_and_a_reshard_takes_them_away(transport: LoopbackTransport) -> None:
    memory_tracker, expected = MemoryTracker(), params()
    bucket = bucket_of(transport, params(), memory_tracker=memory_tracker)
    count = GatherCount()
    bucket.on_change = count.change
    numel = bucket.layout.numel
    assert bucket.state is State.SHARDED
    assert all(parameter.shape == (0,) for parameter in bucket.params)
    assert memory_tracker.live(StorageKind.COMPUTE, Tier.DEVICE) == numel // transport.size * 4
    for _ in range(2):
        assert memory_tracker.live(StorageKind.GATHERED, Tier.DEVICE) == 0
        bucket.start_gather()
        assert (bucket.state, count.live, dict(count.arriving)) == (State.GATHERING, numel, {0: numel})
        bucket.finish_gather()
        assert (bucket.state, count.live, count.arriving_numel) == (State.FULL, numel, 0)
        assert memory_tracker.live(StorageKind.GATHERED, Tier.DEVICE) == numel * 4
        for parameter, value, tile in zip(bucket.params, expected, range(3), strict=True):
            assert type(parameter) is nn.Parameter and torch.equal(parameter, value)
            assert torch.equal(bucket.view(tile), value)
        bucket.is_kept = True
        bucket.reshard()
        assert (bucket.state, count.live, bucket.is_kept) == (State.SHARDED, 0, False)
        assert all(parameter.shape == (0,) for parameter in bucket.params)


@on_threads(2)
def test_wrong_transitions_raise_with_the_state(transport: LoopbackTransport) -> None:
    bucket = bucket_of(transport, params())
    for transition in (bucket.finish_gather, bucket.reshard, bucket.abandon_gather, bucket.pin, bucket.store_shard):
        with pytest.raises(CallOrderError, match="expected .*(FULL|GATHERING|SHARDED)"):
            transition()
    bucket.start_gather()
    for transition in (bucket.start_gather, bucket.reshard, bucket.restore_full, bucket.repeat_gather):
        with pytest.raises(CallOrderError, match="expected .*(FULL|GATHERING|SHARDED)"):
            transition()
    bucket.abandon_gather()
    assert bucket.state is State.SHARDED and not bucket.full.is_allocated
    gathered(bucket)
    for transition in (bucket.start_gather, bucket.finish_gather, bucket.abandon_gather):
        with pytest.raises(CallOrderError, match="expected .*(FULL|GATHERING|SHARDED)"):
            transition()
    assert torch.equal(bucket.params[2], params()[2])  # a gather after one that was abandoned


@on_threads(2)
def test_what_a_forward_writes_reaches_the_shards(transport: LoopbackTransport) -> None:
    bucket = gathered(bucket_of(transport, params()))
    assert bucket.changed_params() == []
    with torch.no_grad():
        bucket.params[2].add_(1.0)
    assert bucket.changed_params() == [2]
    bucket.reshard()
    gathered(bucket)
    assert torch.equal(bucket.params[2], params()[2] + 1.0)
    assert torch.equal(bucket.params[0], params()[0])
    bucket.full.tensor.zero_()
    bucket.restore_full()
    assert torch.equal(bucket.params[2], params()[2] + 1.0)
    bucket.full.tensor.mul_(2.0)
    bucket.store_shard()
    bucket.repeat_gather()
    assert torch.equal(bucket.params[0], params()[0] * 2.0)
    bucket.reshard()
    assert torch.equal(gathered(bucket).params[1], params()[1] * 2.0)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_shares_cover_every_element_once_at_their_offsets(is_sharded: bool) -> None:
    def body(transport: LoopbackTransport) -> tuple[tuple[int, int], torch.Tensor, torch.Tensor]:
        bucket = bucket_of(transport, params(), is_sharded=is_sharded)
        own = bucket.shared_values.clone()
        if is_sharded:
            gathered(bucket)
        return bucket.share, own, bucket.full.tensor.clone()

    found = run_threads(body, 3)
    bounds = [share for share, _, _ in found]
    assert [lower for lower, _ in bounds] == [0, *(upper for _, upper in bounds[:-1])]
    assert bounds[-1][1] == found[0][2].numel()
    assert torch.equal(torch.cat([own for _, own, _ in found]), found[0][2])


def test_a_resident_bucket_publishes_what_owners_wrote() -> None:
    def body(transport: LoopbackTransport) -> torch.Tensor:
        bucket = bucket_of(transport, params(), is_sharded=False)
        assert bucket.state is State.FULL and bucket.params[0].data_ptr() == bucket.view(0).data_ptr()
        with torch.no_grad():
            bucket.shard.fill_(float(transport.rank + 1))
        work = bucket.start_publish()
        assert work is not None
        work.wait()
        return bucket.full.tensor.clone()

    for found in run_threads(body, 2):
        half = found.numel() // 2
        assert bool((found[:half] == 1).all()) and bool((found[half:] == 2).all())


@on_threads(2)
def test_a_sharded_bucket_has_nothing_to_publish(transport: LoopbackTransport) -> None:
    bucket = bucket_of(transport, params())
    assert bucket.start_publish() is None
    gathered(bucket)
    with pytest.raises(CallOrderError, match="expected SHARDED, as parameters change only while"):
        bucket.start_publish()


@on_threads(2)
def test_pins_keep_it_full(transport: LoopbackTransport) -> None:
    bucket = gathered(bucket_of(transport, params()))
    bucket.pin()
    bucket.pin()
    bucket.unpin()
    assert (bucket.state, bucket.users, bucket.pins) == (State.FULL, 1, 1)
    bucket.unpin()
    assert (bucket.state, bucket.users, bucket.pins) == (State.SHARDED, 0, 0)
    gathered(bucket)
    bucket.pin()
    bucket.is_kept = True
    bucket.unpin()
    assert bucket.state is State.FULL  # its backward is near


@on_threads(2)
def test_shapes_are_shown_inside_a_pass_only(transport: LoopbackTransport) -> None:
    bucket = bucket_of(transport, params())
    bucket.show_shapes(True)
    with torch.DisableTorchFunctionSubclass():
        assert [tuple(parameter.shape) for parameter in bucket.params] == SHAPES
        assert all(bool(parameter.isnan().all()) for parameter in bucket.params)
    gathered(bucket)
    bucket.show_shapes(False)
    assert torch.equal(bucket.params[0], params()[0])  # a full one keeps its values
    bucket.reshard()
    assert all(parameter.shape == (0,) for parameter in bucket.params)


def test_a_resident_parameter_that_was_detached_comes_back_with_its_values() -> None:
    bucket = bucket_of(LocalTransport(), params(), is_sharded=False)
    bucket.params[1].data = torch.full((7,), 5.0)
    with torch.no_grad():
        bucket.params[0].mul_(2.0)
    assert bucket.take_back_changes() == [0, 1]
    assert bucket.params[1].data_ptr() == bucket.view(1).data_ptr()
    assert bool((bucket.view(1) == 5.0).all()) and torch.equal(bucket.view(0), params()[0] * 2.0)
    bucket.remember_values()
    assert bucket.take_back_changes() == []
    assert not bucket.reattach(1)
    bucket.params[1].data = torch.zeros(8)
    with pytest.raises(CallOrderError, match=r"'p1' was given the shape \(8,\)"):
        bucket.reattach(1)


def test_an_update_counts_as_a_write_of_what_it_changed() -> None:
    bucket = bucket_of(LocalTransport(), params(), is_sharded=False)
    losses = [parameter.square().sum() for parameter in bucket.params]
    bucket.note_update([True, False, True])
    losses[1].backward()
    for index in (0, 2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[index].backward()


def test_tile_at_and_label() -> None:
    layout_of = bucket_of(LocalTransport(), params(), is_sharded=False)
    starts = layout_of.layout.starts
    assert [layout_of.tile_at(offset) for offset in (*starts, starts[1] - 1, starts[2] + 130)] == [0, 1, 2, 0, 2]
    assert layout_of.label == "p0 ... p2 (3 parameters)"


def test_transitions_are_checked_without_assert_which_python_drops_under_its_option_o() -> None:
    tree = ast.parse(Path(inspect.getfile(Bucket)).read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
