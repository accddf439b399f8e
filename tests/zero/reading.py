"""What the engine holds, as whole named tensors. Every rank must call these."""

import torch
import torch.distributed as dist

from deepspeed.engine import DeepSpeedEngine
from deepspeed.zero.tiling.layout import BucketLayout


def full_masters(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """The master weights by name, put together from the ranks' slices by torch's own collectives."""
    masters = engine._runtime.masters
    places = [(master.bucket.layout.numel, master.layout.slice_bounds(master.rank)[0]) for master in masters]
    flats = _whole([master.flat for master in masters], places)
    return _named([master.bucket.layout for master in masters], flats)


def full_params(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """The compute parameters by name, frozen ones included, without a gather by the engine."""
    buckets = engine._runtime.buckets
    places = [(bucket.layout.numel, bucket.layout.slice_bounds(bucket.transport.rank)[0]) for bucket in buckets]
    flats = _whole([bucket.shard if bucket.is_sharded else bucket.full.tensor for bucket in buckets], places)
    return _named([bucket.layout for bucket in buckets], flats)


def full_states(engine: DeepSpeedEngine) -> dict[str, dict[str, torch.Tensor]]:
    """Per-element optimizer state by parameter name, then by its own name. State that a rank lacks counts as zero."""
    masters = engine._runtime.masters
    states = [[engine.basic_optimizer.state.get(run.param, {}) for run in master.runs] for master in masters]
    mine = [
        {k for state in of_runs for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
        for of_runs in states
    ]
    everywhere = [mine]
    if dist.is_initialized():
        everywhere = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, mine)
    wanted = [
        (number, key) for number in range(len(masters)) for key in sorted({k for r in everywhere for k in r[number]})
    ]
    flats, places = [], []
    for number, key in wanted:
        master = masters[number]
        flat = torch.zeros_like(master.flat)
        for run, state in zip(master.runs, states[number], strict=True):
            if isinstance(state.get(key), torch.Tensor):
                flat[run.interval.start : run.interval.start + state[key].numel()].copy_(state[key].reshape(-1))
        flats.append(flat)
        places.append((master.bucket.layout.numel, master.layout.slice_bounds(master.rank)[0]))
    found: dict[str, dict[str, torch.Tensor]] = {}
    for (number, key), whole in zip(wanted, _whole(flats, places), strict=True):
        for name, value in _named([masters[number].bucket.layout], [whole]).items():
            found.setdefault(name, {})[key] = value
    return found


def _whole(mine: list[torch.Tensor], places: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Everybody's parts, each where it belongs; ranks that hold the same part must hold the same bits.

    Args:
        mine: Parts of flat tensors, or whole ones, as many and as long on every rank.
        places: For each, the length of the whole, and where this rank's part begins.
    """
    cut = [(part, *place) for part, place in zip(mine, places, strict=True) if part.numel() != place[0]]
    if not cut:
        return mine
    # One collective for all of them: switching between ranks is what costs processor time in a test.
    starts = torch.tensor([start for _, _, start in cut])
    sent = torch.cat([starts.view(torch.uint8), *(part.detach().reshape(-1).view(torch.uint8) for part, _, _ in cut)])
    everywhere = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, sent)
    put_together, position = [], starts.nbytes
    for number, (part, numel, _) in enumerate(cut):
        unknown = float("nan") if part.dtype.is_floating_point or part.dtype.is_complex else 0
        whole = torch.full((numel,), unknown, dtype=part.dtype)
        seen: dict[int, torch.Tensor] = {}
        for message in everywhere:
            first = int(message[8 * number : 8 * number + 8].clone().view(torch.int64))
            theirs = message[position : position + part.nbytes].clone()
            same = torch.equal(seen.setdefault(first, theirs), theirs)  # bits: nan is nan here
            assert same, f"ranks hold different values from element {first} on"
            whole[first : first + part.numel()] = theirs.view(part.dtype)
        put_together.append(whole)
        position += part.nbytes
    made = iter(put_together)
    return [part if part.numel() == numel else next(made) for part, (numel, _) in zip(mine, places, strict=True)]


def _named(layouts: list[BucketLayout], flats: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        tile.name: flat[start : start + tile.numel].view(tile.shape).detach().clone()
        for layout, flat in zip(layouts, flats, strict=True)
        for tile, start in zip(layout.tiles, layout.starts, strict=True)
    }
