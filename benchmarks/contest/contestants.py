"""The contestants of ``zero.py``: each turns a workload into a function ``step(batch) -> loss``.

All start from the same weights, see the same batches and use AdamW with the same settings, without clipping and
accumulation. Needs torch only; contestants that use `deepspeed` import it themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from contest.workloads import Batch, Workload

Step = Callable[[Batch], float]
_MALLOC_TRIM_THRESHOLD, _MALLOC_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Contestant:
    """One way of training.

    Attributes:
        name: In tables and on the command line.
        about: Dtypes and settings, in one line.
        build: Returns the step function; called in the worker process.
        peer: Whether it runs in the environment of ``--peer-python``.
    """

    name: str
    about: str
    build: Callable[[Workload], Step]
    peer: bool = False


class _MasterUpdate:
    """Updates fp32 masters of a bf16 model with torch's fused AdamW and copies them back."""

    def __init__(self, module: nn.Module) -> None:
        self.params = list(module.parameters())
        self.masters = [param.detach().float() for param in self.params]
        self.gradients = [torch.empty_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **ADAMW)

    def __call__(self) -> None:
        gradients = [param.grad for param in self.params if param.grad is not None]
        torch._foreach_copy_(self.gradients, gradients)
        self.optimizer.step()
        torch._foreach_copy_([param.detach() for param in self.params], self.masters)


def _with_masters(module: nn.Module) -> Step:
    update = _MasterUpdate(module)

    def step(batch: Batch) -> float:
        loss = module(*batch)
        loss.backward()
        update()
        module.zero_grad()
        return loss.item()

    return step


def _under_autocast(module: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)

    def step(batch: Batch) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _hand(workload: Workload) -> Step:
    return _with_masters(workload.build().bfloat16())


def _autocast(workload: Workload) -> Step:
    return _under_autocast(workload.build())


def _ddp(workload: Workload) -> Step:
    return _under_autocast(nn.parallel.DistributedDataParallel(workload.build(), gradient_as_bucket_view=True))


def _ddp_bf16(workload: Workload) -> Step:
    return _with_masters(nn.parallel.DistributedDataParallel(workload.build().bfloat16(), gradient_as_bucket_view=True))


def _floor(workload: Workload, *, replicated: bool = False) -> Step:
    """Runs forward, backward and the update of this rank's share of the parameters, without communication.

    Its weights are wrong from the second step on, because only its own share changes; the time is the same.

    Args:
        workload: The model with its data.
        replicated: Update all parameters, as every rank does at stage 0.
    """
    module = workload.build().bfloat16()
    params = list(module.parameters())
    total = sum(param.numel() for param in params)
    flat = torch.empty(total, dtype=torch.bfloat16)
    gradients = torch.zeros_like(flat)
    start = 0
    for param in params:
        stop = start + param.numel()
        flat[start:stop].copy_(param.detach().flatten())
        param.data = flat[start:stop].view(param.shape)
        param.grad = gradients[start:stop].view(param.shape)
        start = stop
    own = slice(0, total if replicated else total // workload.world_size)
    master = flat[own].float()
    own_gradient = master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW([master], fused=True, **ADAMW)

    def step(batch: Batch) -> float:
        loss = module(*batch)
        for param in params:
            param.grad = None  # the first gradient is stored, not added
        loss.backward()
        start = 0
        for param in params:
            stop = start + param.numel()
            assert param.grad is not None
            gradients[start:stop].copy_(param.grad.flatten())
            start = stop
        own_gradient.copy_(gradients[own])
        optimizer.step()
        flat[own].copy_(master)
        return loss.item()

    return step


def fully_sharded(module: nn.Module, device: str, ranks: int) -> nn.Module:
    """Returns the model under FSDP2: a unit per block, fp32 shards, bf16 computation and reduction."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for unit in (*module.blocks, module):  # type: ignore[misc]
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return module


def _fsdp2(workload: Workload) -> Step:
    module = fully_sharded(workload.build(), "cpu", workload.world_size)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)

    def step(batch: Batch) -> float:
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _with_our_malloc(build: Callable[[Workload], Step]) -> Callable[[Workload], Step]:
    """Returns ``build`` after the two malloc settings that our engine makes on glibc, to measure their share."""

    def tuned(workload: Workload) -> Step:
        mallopt = ctypes.CDLL(None).mallopt
        if not (mallopt(_MALLOC_MMAP_THRESHOLD, 1 << 30) and mallopt(_MALLOC_TRIM_THRESHOLD, 2**31 - 1)):
            raise RuntimeError("mallopt refused; the *-malloc contestants need glibc")
        return build(workload)

    return tuned


OFFLOADED = {"": (), "host": ("offload_optimizer",), "host-all": ("offload_optimizer", "offload_param")}
"""Sections that send states to host memory, by the ending of a contestant's name."""


def zero_section(stage: int, offloaded: str = "") -> dict[str, Any]:
    """Returns the section ``zero_optimization`` of both packages; stage 3 shards small parameters too."""
    zero: dict[str, Any] = {"stage": stage}
    for section in OFFLOADED[offloaded]:
        zero[section] = {"device": "cpu"}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return zero


def engine_config(zero: dict[str, Any], micro_batch: int, clip: float = 0.0) -> dict[str, Any]:
    """Returns the ``ds_config`` of both packages, with the section ``zero_optimization`` as given."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "bf16": {"enabled": True},
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
    }


def _run_engine(module: nn.Module, config: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> Step:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), optimizer=optimizer, config=config
    )

    def step(batch: Batch) -> float:
        loss: Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def _ours(stage: int, offloaded: str = "") -> Callable[[Workload], Step]:
    zero = zero_section(stage, offloaded)
    return lambda workload: _run_engine(workload.build(), engine_config(zero, workload.micro_batch), None)


def _upstream(stage: int, *, own_optimizer: bool = False, offloaded: str = "") -> Callable[[Workload], Step]:
    """Builds the published package with torch's fused AdamW; ``own_optimizer``: with its own for ``AdamW``."""

    def build(workload: Workload) -> Step:
        module = workload.build()
        config = engine_config(zero_section(stage, offloaded), workload.micro_batch)
        if own_optimizer or offloaded:  # offloaded states need the host optimizer that the config builds
            return _run_engine(module, config, None)
        del config["optimizer"]
        config["zero_allow_untested_optimizer"] = True
        return _run_engine(module, config, torch.optim.AdamW(module.parameters(), fused=True, **ADAMW))

    return build


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("floor", "arithmetic alone: forward, backward, update of 1/ranks of the parameters", _floor),
        Contestant("floor-0", "the same with the update of all parameters (stage 0)", partial(_floor, replicated=True)),
        Contestant("hand", "bf16 weights, fp32 masters, fused AdamW, no autocast, no communication", _hand),
        Contestant("autocast", "fp32 weights, bf16 autocast, fused AdamW, no communication", _autocast),
        Contestant("ddp", "DDP, fp32 weights and gradients, bf16 autocast, fused AdamW", _ddp),
        Contestant("ddp-bf16", "DDP, bf16 weights and gradients, fp32 masters, fused AdamW", _ddp_bf16),
        Contestant("fsdp2", "fully_shard per block and root, fp32 shards, bf16 compute and reduction", _fsdp2),
        Contestant("ddp-bf16-malloc", "ddp-bf16, with our engine's malloc settings", _with_our_malloc(_ddp_bf16)),
        Contestant("fsdp2-malloc", "fsdp2, with our engine's malloc settings", _with_our_malloc(_fsdp2)),
        *(
            Contestant(f"upstream-{s}", f"published deepspeed, ZeRO {s}, torch fused AdamW", _upstream(s), peer=True)
            for s in range(4)
        ),
        *(
            Contestant(
                f"upstream-config-{s}",
                f"published deepspeed, ZeRO {s}, the AdamW that its config builds",
                _upstream(s, own_optimizer=True),
                peer=True,
            )
            for s in range(4)
        ),
        *(Contestant(f"ours-{s}", f"this project, ZeRO {s}", _ours(s)) for s in range(4)),
        *(
            Contestant(
                f"{who}-{stage}-{tier}",
                f"{'this project' if who == 'ours' else 'published deepspeed'}, ZeRO {stage}, "
                f"{'optimizer' if tier == 'host' else 'optimizer and parameters'} in host memory",
                _ours(stage, tier) if who == "ours" else _upstream(stage, offloaded=tier),
                peer=who == "upstream",
            )
            for who in ("upstream", "ours")
            for stage, tier in ((2, "host"), (3, "host"), (3, "host-all"))
        ),
    )
}


def join_group(workload: Workload, rank: int, rendezvous: str) -> None:
    """Creates the gloo group of one contestant by a rendezvous file; every rank of the contestant must call it."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=workload.world_size)
