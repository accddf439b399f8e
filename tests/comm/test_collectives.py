"""Every collective of deepspeed.comm does what its namesake in torch is documented to do, at 1, 2 and 3 ranks."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist

import deepspeed.comm as dist
from tests.harness import on_ranks, run_ranks

WORLD_SIZES = [1, 2, 3]
run_at_each_size = pytest.mark.parametrize("world_size", WORLD_SIZES)


def _mine(numel: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(numel, dtype=dtype) + 10 * dist.get_rank()


def _of(rank: int, numel: int = 4) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) + 10 * rank


def _sum(numel: int = 4) -> torch.Tensor:
    return sum((_of(r, numel) for r in range(dist.get_world_size())), torch.zeros(numel))


def _wait(handle, async_op: bool) -> None:
    assert (handle is not None) == async_op
    if async_op:
        handle.wait()


def check_reductions(async_op: bool) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for reduce in (dist.all_reduce, dist.inference_all_reduce):
        tensor = _mine()
        _wait(reduce(tensor, async_op=async_op), async_op)
        assert torch.equal(tensor, _sum())
    tensor = _mine()
    _wait(dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=async_op), async_op)
    assert torch.equal(tensor, _of(size - 1))
    tensor = _mine()
    _wait(dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=async_op), async_op)
    assert torch.allclose(tensor, _sum() / size)
    tensor = _mine()
    _wait(dist.reduce(tensor, size - 1, async_op=async_op), async_op)
    if rank == size - 1:
        assert torch.equal(tensor, _sum())
    tensors = [_mine(3), _mine(5)]
    _wait(dist.all_reduce_coalesced(tensors, async_op=async_op), async_op)
    assert torch.equal(tensors[0], _sum(3)) and torch.equal(tensors[1], _sum(5))


def check_scatters(async_op: bool) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    expected = _sum(2 * size)[2 * rank : 2 * rank + 2]
    for reduce_scatter in (dist.reduce_scatter_tensor, dist.reduce_scatter_fn):
        output = torch.empty(2)
        _wait(reduce_scatter(output, _mine(2 * size), async_op=async_op), async_op)
        assert torch.equal(output, expected)
    output = torch.empty(2)
    _wait(dist.reduce_scatter(output, list(_mine(2 * size).chunk(size)), async_op=async_op), async_op)
    assert torch.equal(output, expected)
    output = torch.empty(2)
    parts = [_of(r, 2) for r in range(size)] if rank == 0 else None
    _wait(dist.scatter(output, parts, src=0, async_op=async_op), async_op)
    assert torch.equal(output, _of(rank, 2))


def check_gathers(async_op: bool) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    everything = torch.cat([_of(r) for r in range(size)])
    for gather in (dist.all_gather_into_tensor, dist.allgather_fn):
        output = torch.empty(4 * size)
        _wait(gather(output, _mine(), async_op=async_op), async_op)
        assert torch.equal(output, everything)
    parts = [torch.empty(4) for _ in range(size)]
    _wait(dist.all_gather(parts, _mine(), async_op=async_op), async_op)
    assert torch.equal(torch.cat(parts), everything)
    outputs = [torch.empty(4 * size), torch.empty(2 * size)]
    _wait(dist.all_gather_coalesced(outputs, [_mine(4), _mine(2)], async_op=async_op), async_op)
    assert torch.equal(outputs[0], everything)
    assert torch.equal(outputs[1], torch.cat([_of(r, 2) for r in range(size)]))
    parts = [torch.empty(4) for _ in range(size)]
    _wait(dist.gather(_mine(), parts if rank == 0 else None, dst=0, async_op=async_op), async_op)
    if rank == 0:
        assert torch.equal(torch.cat(parts), everything)


def check_broadcast_and_exchange(async_op: bool) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    tensor = _mine()
    _wait(dist.broadcast(tensor, src=size - 1, async_op=async_op), async_op)
    assert torch.equal(tensor, _of(size - 1))
    expected = torch.cat([_of(r, 2 * size)[2 * rank : 2 * rank + 2] for r in range(size)])
    output = torch.empty(2 * size)
    _wait(dist.all_to_all_single(output, _mine(2 * size), async_op=async_op), async_op)
    assert torch.equal(output, expected)
    outputs = [torch.empty(2) for _ in range(size)]
    _wait(dist.all_to_all(outputs, list(_mine(2 * size).chunk(size)), async_op=async_op), async_op)
    assert torch.equal(torch.cat(outputs), expected)


def check_uneven_all_to_all() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    # Rank r sends i + 1 elements to rank i.
    counts = [i + 1 for i in range(size)]
    outputs = [torch.empty(rank + 1, 2) for _ in range(size)]
    handle = dist.all_to_all(outputs, [torch.full((count, 2), float(rank)) for count in counts], async_op=True)
    for _ in range(2):
        handle.wait()
    assert handle.is_completed()
    assert [part.tolist() for part in outputs] == [[[float(r)] * 2] * (rank + 1) for r in range(size)]
    output = torch.empty((rank + 1) * size)
    dist.all_to_all_single(output, torch.full((sum(counts),), float(rank)), [rank + 1] * size, counts)
    assert output.tolist() == [float(r) for r in range(size) for _ in range(rank + 1)]


@on_ranks(2)
def test_all_to_all_of_lists_as_in_torch() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = [torch.full((2,), float(rank)) for _ in range(size)]
    outputs = [torch.nn.Parameter(torch.empty(2)) for _ in range(size)]
    dist.all_to_all(outputs, mine)
    assert [output.tolist() for output in outputs] == [[float(r)] * 2 for r in range(size)]
    with pytest.raises(ValueError, match="dtype"):
        dist.all_to_all([torch.empty(2, dtype=torch.int32 if r else torch.float32) for r in range(size)], mine)
    group = dist.new_group([0])
    output = torch.zeros(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on a rank that is not in the group
        handle = dist.all_to_all([output], mine[:1], group=group, async_op=True)
    assert (handle is None) == (rank > 0)
    if handle is not None:
        handle.wait()


def _strided(rank: int, transposed: bool) -> torch.Tensor:
    whole = torch.arange(24.0).view(4, 6) + 100 * rank
    return whole.t() if transposed else whole[:, ::2]


@on_ranks(2)
def test_expanded_tensors() -> None:
    x = _mine(3).view(3, 1).expand(3, 2)
    dist.all_reduce(x)
    assert torch.equal(x, _sum(3).view(3, 1).expand(3, 2))
    x = _mine(3).view(3, 1).expand(3, 2)
    dist.broadcast(x, 1)
    assert torch.equal(x, _of(1, 3).view(3, 1).expand(3, 2))


@on_ranks(2)
def test_shapes_of_flat_collectives() -> None:
    """Only the numbers of elements matter."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for part, whole in [
        ((), (size,)),
        ((2, 3), (6 * size,)),
        ((2, 3), (size, 2, 3)),
        ((6,), (1, 6 * size)),
        ((0,), (0,)),
    ]:
        numel = torch.Size(part).numel()
        everything = torch.cat([_of(r, numel) for r in range(size)])
        output = torch.empty(whole)
        dist.all_gather_into_tensor(output, _mine(numel).view(part))
        assert torch.equal(output, everything.view(whole))
        output = torch.empty(whole)
        dist.all_gather_coalesced([output], [_mine(numel).view(part)])
        assert torch.equal(output, everything.view(whole))
        output = torch.empty(*part, 2)[..., 0]
        dist.reduce_scatter_tensor(output, _mine(numel * size).view(whole))
        assert torch.equal(output, _sum(numel * size).chunk(size)[rank].view(part))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(2)
def test_strided_tensors(async_op: bool, transposed: bool) -> None:
    """The result is that of contiguous tensors, and what lies between the elements is untouched."""
    size, rank = dist.get_world_size(), dist.get_rank()
    every = [_strided(r, transposed) for r in range(size)]
    mine, total = every[rank].contiguous(), sum(every)
    exchanged = torch.cat([part.chunk(size)[rank] for part in every])
    for name, arguments, expected in (
        ("all_reduce", (), total),
        ("inference_all_reduce", (), total),
        ("reduce", (0,), total),
        ("broadcast", (size - 1,), every[-1]),
        ("reduce_scatter", ([_strided(rank, transposed)] * size,), total),
        ("scatter", (every if rank == 0 else None,), every[rank]),
        ("all_to_all_single", (mine,), exchanged),
    ):
        x = _strided(rank, transposed)
        memory = x.as_strided((24,), (1,))
        gaps = memory[1::2].clone()
        _wait(getattr(dist, name)(x, *arguments, async_op=async_op), async_op)
        assert torch.equal(x, expected) or (name == "reduce" and rank > 0), name
        assert transposed or torch.equal(memory[1::2], gaps), name


def check_group_after_a_refused_coalescing() -> list:
    """Returns sums over the group after calls that raise: they are made, and not collected for a launch."""
    tensor, found = torch.ones(1), []
    refused = (
        lambda: dist.all_gather_coalesced([torch.empty(dist.get_world_size())], [tensor, tensor]),
        lambda: dist.all_reduce_coalesced([tensor, None]),
    )
    for call in refused:
        with pytest.raises((TypeError, ValueError)):
            call()
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.all_reduce_coalesced([total])
        found.append(total.item())
    return found


def test_a_refused_coalescing_leaves_the_group_usable():
    assert run_ranks(check_group_after_a_refused_coalescing, 2) == [[4.0, 4.0]] * 2


def check_objects() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": r} for r in range(size)]
    items = [("from", rank), None]
    dist.broadcast_object_list(items, src=size - 1)
    assert items == [("from", size - 1), None]


def check_point_to_point() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(4)
    handles = [dist.isend(_mine(), right, tag=3), dist.irecv(received, left, tag=3)]
    for handle in handles:
        handle.wait()
    assert torch.equal(received, _of(left))
    received = torch.empty(4)
    for handle in dist.batch_isend_irecv(
        [dist.P2POp(torch_dist.isend, _mine(), right), dist.P2POp(torch_dist.irecv, received, left)]
    ):
        handle.wait()
    assert torch.equal(received, _of(left))
    if rank == 0:
        dist.send(_mine(), 1)
    elif rank == 1:
        received = torch.empty(4)
        assert dist.recv(received, 0) == 0
        assert torch.equal(received, _of(0))


def check_without_warnings(name: str, *args) -> None:
    """Runs one of the checks with every warning turned into an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        globals()[name](*args)


@run_at_each_size
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    "check", ["check_reductions", "check_scatters", "check_gathers", "check_broadcast_and_exchange"]
)
def test_tensor_collectives(check, async_op, world_size):
    run_ranks(check_without_warnings, world_size, check, async_op)


@run_at_each_size
@pytest.mark.parametrize("check", ["check_uneven_all_to_all", "check_objects", "check_point_to_point"])
def test_other_collectives(check, world_size):
    run_ranks(check_without_warnings, world_size, check)


@on_ranks(2)
def test_profiling_arguments_are_accepted() -> None:
    tensor, output = torch.ones(1), torch.empty(dist.get_world_size())
    extra = {"prof": True, "log_name": "mine", "debug": "caller"}
    dist.all_reduce(tensor, **extra)
    dist.broadcast(tensor, 0, **extra)
    dist.all_gather_into_tensor(output, tensor, **extra)
    dist.reduce_scatter_tensor(tensor, output, **extra)
    dist.barrier(**extra)
    dist.all_gather([torch.empty(1) for _ in range(dist.get_world_size())], tensor, **extra)
    assert not dist.has_comm_data()  # the log is off: prof alone records nothing


def check_groups() -> tuple:
    size, rank = dist.get_world_size(), dist.get_rank()
    assert dist.is_available() and dist.is_initialized()
    assert (rank, size) == (torch_dist.get_rank(), torch_dist.get_world_size())
    assert dist.get_local_rank() == rank
    assert dist.get_world_group() is torch_dist.group.WORLD
    assert dist.get_all_ranks_from_group() == list(range(size))
    assert dist.get_global_rank() == 0 and dist.get_global_rank(None, size - 1) == size - 1
    last_two = list(range(max(0, size - 2), size))
    group = dist.new_group(last_two)
    if rank not in last_two:
        assert dist.get_rank(group) == dist.get_world_size(group) == -1
        return ()
    assert isinstance(group, dist.ProcessGroup)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == sum(last_two)
    dist.barrier(group)
    dist.monitored_barrier(group, timeout=timedelta(seconds=20))
    assert dist.get_all_ranks_from_group(group) == last_two
    assert dist.get_global_rank(group, dist.get_rank(group)) == rank
    dist.destroy_process_group(group)
    return (rank,)


@run_at_each_size
def test_groups(world_size):
    answers = run_ranks(check_groups, world_size)
    assert sum(len(answer) for answer in answers) == min(2, world_size)


def check_missing_rank_is_named() -> str:
    if dist.get_rank() == 1:
        return ""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_monitored_barrier_names_the_missing_rank():
    answers = run_ranks(check_missing_rank_is_named, 2)
    assert "1" in answers[0] and answers[0] != "no error"


def check_mesh() -> tuple:
    mesh = dist.initialize_mesh_device((1, dist.get_world_size()), ("outer", "inner"))
    return tuple(mesh.shape), mesh.mesh_dim_names, mesh.get_local_rank("inner") == dist.get_rank()


def test_device_mesh():
    assert run_ranks(check_mesh, 2) == [((1, 2), ("outer", "inner"), True)] * 2


def test_reduce_ops_are_those_of_torch():
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"):
        assert getattr(dist.ReduceOp, name) == getattr(torch_dist.ReduceOp, name)
    assert dist.ReduceOp.UNUSED not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def test_names_of_backends_and_capabilities():
    names = {name: getattr(dist, f"{name.upper()}_BACKEND") for name in ("nccl", "gloo", "mpi", "ccl", "hccl", "sccl")}
    assert all(name == value for name, value in names.items())
    assert dist.has_all_gather_into_tensor() and dist.has_reduce_scatter_tensor()
    assert dist.has_coalescing_manager() and dist.has_all_reduce_coalesced()
