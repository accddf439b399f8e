"""What the engine holds, as whole named tensors. Every rank must call these."""

from __future__ import annotations

import torch
import torch.distributed as dist

from deepspeed.engine import DeepSpeedEngine


def full_masters(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """The master weights by name, put together from the ranks' slices by torch's own collectives."""
    found = {}
    for master in engine._runtime.masters:
        flat = _whole(master.flat, master.bucket.layout.numel, master.layout.slice_bounds(master.rank)[0])
        found.update(_named(master.bucket.layout, flat))
    return found


def full_params(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """The compute parameters by name, frozen ones included, without a gather by the engine."""
    found = {}
    for bucket in engine._runtime.buckets:
        start = bucket.layout.slice_bounds(bucket.transport.rank)[0]
        flat = _whole(bucket.shard, bucket.layout.numel, start) if bucket.is_sharded else bucket.full.tensor
        found.update(_named(bucket.layout, flat))
    return found


def full_states(engine: DeepSpeedEngine) -> dict[str, dict[str, torch.Tensor]]:
    """Per-element optimizer state by parameter name, then by its own name. State that a rank lacks counts as zero."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for master in engine._runtime.masters:
        states = [engine.basic_optimizer.state.get(run.param, {}) for run in master.runs]
        keys = sorted({k for state in states for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()})
        gathered: list[list[str]] = [keys]
        if dist.is_initialized():
            gathered = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(gathered, keys)
        for key in sorted({key for keys in gathered for key in keys}):
            flat = torch.zeros_like(master.flat)
            for run, state in zip(master.runs, states, strict=True):
                if isinstance(state.get(key), torch.Tensor):
                    flat[run.span.start : run.span.start + state[key].numel()].copy_(state[key].reshape(-1))
            start = master.layout.slice_bounds(master.rank)[0]
            for name, value in _named(master.bucket.layout, _whole(flat, master.bucket.layout.numel, start)).items():
                found.setdefault(name, {})[key] = value
    return found


def _whole(mine: torch.Tensor, numel: int, start: int) -> torch.Tensor:
    """Everybody's part, each where it belongs; ranks that hold the same part must hold the same bits."""
    if mine.numel() == numel:
        return mine
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    starts = [torch.empty(1, dtype=torch.int64) for _ in parts]
    dist.all_gather(parts, mine.contiguous())
    dist.all_gather(starts, torch.tensor([start]))
    whole = torch.full((numel,), float("nan"), dtype=mine.dtype)
    seen: dict[int, torch.Tensor] = {}
    for first, part in zip((int(tensor) for tensor in starts), parts, strict=True):
        known = seen.setdefault(first, part)
        same = torch.equal(known.view(torch.uint8), part.view(torch.uint8))  # bits: nan is nan here
        assert same, f"ranks hold different values from element {first} on"
        whole[first : first + part.numel()] = part
    return whole


def _named(layout, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        tile.name: flat[start : start + tile.numel].view(tile.shape).detach().clone()
        for tile, start in zip(layout.tiles, layout.starts, strict=True)
    }
