"""Features of the engine on simulated devices between processes: ordered, bounded, and the losses of the CPU.

What a step may hold is what ``deepspeed.plan`` computes for the same configuration, kind by kind and in all; for
inference, which is not planned, a formula.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.parallel.expert.gate import TopKGate
from deepspeed.parallel.tensor.batches import WORDS
from deepspeed.pipe import PipelineModule
from deepspeed.plan import DecoderShape
from deepspeed.plan.decoder import Decoder, layers_of, token_loss
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind
from tests.device.support import TIERS
from tests.engine.support import rank
from tests.harness import run_ranks
from tests.harness.device import Device, simulated_rank

SHAPE = DecoderShape(layers=2, hidden=64, heads=4, vocab=128, intermediate=96)
SAMPLES, TOKENS = 2, 32
UNIT = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64  # elements of a block
STEPS = 4  # the first two learn orders and make states

FEATURES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2, "accumulation": 2},
    "stage 3": {"stage": 3},
    "optimizer on the host": {"stage": 1, "tier": "optimizer on the host"},
    "both on the host": {"stage": 3, "tier": "both on the host"},
    "updates before the norm": {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
    "both in files": {"stage": 3, "tier": "both in files"},
    "codes": {"stage": 3, "zero": {"zero_quantized_weights": True, "zero_quantized_gradients": True}},
    "1-bit Adam": {"stage": 1, "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 1}}},
    "Muon": {"stage": 1, "optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
    "experts": {"stage": 1, "plan": {"ep": 2}},
    "tensor": {"stage": 1, "tensor_parallel": {"autotp_size": 2, "verify": False}},
    "sequence": {"stage": 1, "sequence_parallel_size": 2},
    "pipeline": {"stage": 1, "accumulation": 8, "plan": {"pipe": 2}},
}
"""What each adds to the configuration, and in "plan" to the plan."""

SLOW = ("stage 0", "optimizer on the host", "both on the host", "Muon", "inference over tensor ranks")
"""Those whose parts the others have too."""

ASIDE = {
    "tensor": 8 * WORDS,
    "inference over tensor ranks": 8 * WORDS,
    "pipeline": 4 * SAMPLES * TOKENS * SHAPE.hidden,
}
"""Bytes that a plan does not count. Tensor ranks compare their batches by values. An activation that a stage has sent
stays until the next one has received it, later than planned where that rank is late: seen on busy machines."""

TOLERANCE = 1.1
"""Of the highest sum of all device memory: blocks are rounded up to 512 bytes, a bucket more may be in
flight, and the simulated device computes RMSNorm in several operations, where the plan has the one kernel of CUDA."""
KIND_TOLERANCE = 1.05
"""Of the highest sum of one kind."""
EXPERTS_TOLERANCE = 1.5
"""The same where buckets of experts are complete in another order than others, so that more of them are in flight: up
to 1.34 was seen, since no backward waits there, and when the peer reduces depends on the scheduler. The sum of all
device memory keeps its limit."""


def _config(name: str, folder: str) -> dict[str, Any]:
    given = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **FEATURES[name]}
    given.pop("plan", None)
    zero = {
        "stage": given.pop("stage"),
        "overlap_comm": True,
        "reduce_bucket_size": UNIT,
        "sub_group_size": UNIT,
        "stage3_prefetch_bucket_size": UNIT,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        **given.pop("zero", {}),
    }
    for key, device in TIERS[given.pop("tier", "device")].items():
        zero[key] = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
    if zero.get("offload_param", {}).get("device") == "nvme":
        zero["offload_param"] |= {"max_in_cpu": 0, "buffer_size": UNIT}
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": given.pop("accumulation", 1),
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        **given,
    }


def _shape(name: str) -> DecoderShape:
    return replace(SHAPE, experts=4) if name == "experts" else SHAPE


def _engine(name: str, folder: str) -> Any:
    torch.manual_seed(0)
    if name == "pipeline":
        model: Any = PipelineModule(layers_of(SHAPE), num_stages=2, loss_fn=token_loss)
    else:
        shape = _shape(name)
        model = Decoder(replace(shape, expert_ranks=2) if shape.experts else shape)
    return deepspeed.initialize(model=model, config=_config(name, folder))[0]


def _batch(name: str, *position: int) -> list[torch.Tensor]:
    """Tokens and labels: the same on ranks that share layers, this rank's part where ranks share sequences."""
    place = 0 if name in ("tensor", "sequence", "pipeline") else rank()
    random = torch.Generator().manual_seed(sum(number * 10**at for at, number in enumerate((place, *position))))
    whole = [torch.randint(0, SHAPE.vocab, (SAMPLES, TOKENS), generator=random) for _ in ("tokens", "labels")]
    return [part.chunk(2, 1)[rank()].contiguous() for part in whole] if name == "sequence" else whole


def _step(engine: Any, name: str, number: int) -> float:
    batches = [_batch(name, number, micro) for micro in range(engine.gradient_accumulation_steps())]
    if name == "pipeline":
        return float(engine.train_batch(iter([tuple(batch) for batch in batches])).item())
    for batch in batches:
        loss = engine(*(value.to(engine.device) for value in batch))
        value = float(loss.item())  # here, so that the host does not wait for the update
        engine.backward(loss)
        engine.step()
    return value


@contextmanager
def _tokens_spread_evenly() -> Iterator[None]:
    """Inside, tokens take the experts in turn: what a plan expects."""
    routes = TopKGate.routes

    def even(self: TopKGate, *args: Any) -> Any:
        found = routes(self, *args)
        places = torch.arange(found.indices.numel(), device=found.indices.device)
        return replace(found, indices=places.view_as(found.indices) % found.num_experts)

    with mock.patch.object(TopKGate, "routes", even):
        yield


def _trained(name: str, folder: str) -> dict[str, Any]:
    """Trains on this rank and counts what the later steps hold."""
    engine = _engine(name, folder)
    accelerator, memory_tracker = deepspeed.get_accelerator(), engine._runtime.memory_tracker
    losses, reserved = [], []
    for number in range(STEPS):
        if number == STEPS - 2:
            engine.optimizer.count_state()
            memory_tracker.reset_peak()
            accelerator.reset_peak_memory_stats()
        losses.append(_step(engine, name, number))
        reserved.append(accelerator.max_memory_reserved())
    kinds = {(kind.name, tier.name): memory_tracker.peak(kind, tier) for kind in StorageKind for tier in Tier}
    found = {
        "losses": losses,
        "kinds": {key: nbytes for key, nbytes in kinds.items() if nbytes},
        "allocated": accelerator.max_memory_allocated(),
        "reserved": reserved,
    }
    engine.destroy()
    return found


def _served(**given: Any) -> dict[str, Any]:
    """Runs a served model on this rank and counts what a forward holds."""
    torch.manual_seed(0)
    engine = deepspeed.init_inference(Decoder(SHAPE), dtype=torch.float32, **given)
    accelerator = deepspeed.get_accelerator()
    losses = []
    for number in range(3):
        if number == 2:
            accelerator.reset_peak_memory_stats()
        with torch.no_grad():
            tokens = [value.to(accelerator.current_device_name()) for value in _batch("tensor", number)]
            losses.append(engine(*tokens).item())
    found = {"losses": losses, "allocated": accelerator.max_memory_allocated()}
    engine.destroy()
    return found


INFERENCE: dict[str, dict[str, Any]] = {
    "inference": {
        "zero": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 1,
            "stage3_max_reuse_distance": 0,
        }
    },
    "inference over tensor ranks": {"tensor_parallel": {"tp_size": 2}},
}


def _all(folder: str, names: list[str], device: Device | None = None) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        for _ in range(3):  # parameters whose graph is freed in one pass are freed in the next
            gc.collect()
        if device is not None:
            deepspeed.get_accelerator().synchronize()  # transfers of the one before have let go of their buffers
            deepspeed.get_accelerator().empty_cache()
            device.forget_most_registered()
        with _tokens_spread_evenly():
            found[name] = _trained(name, folder) if name in FEATURES else _served(**INFERENCE[name])
        found[name]["registered"] = 0 if device is None else device.most_registered
    return found


def _all_on_devices(folder: str, names: list[str]) -> dict[str, dict[str, Any]]:
    with simulated_rank() as device:
        return _all(folder, names, device)


def _bytes_of_inference(name: str) -> int:
    """What one of two ranks needs for a forward, fp32."""
    embedding = head = SHAPE.vocab * SHAPE.hidden
    blocks = SHAPE.layers * UNIT
    samples = SAMPLES * TOKENS
    # In a feed-forward layer: the stream, its norm, two products, one activated, and theirs. In the loss: the stream,
    # its norm, logits and their softmax.
    largest = max(2 * SHAPE.hidden + 4 * SHAPE.width, 2 * SHAPE.hidden + 2 * SHAPE.vocab)
    if name == "inference":  # half of all, a unit and the next one, which is on its way
        return 4 * ((embedding + blocks + head) // 2 + 2 * UNIT + samples * largest)
    norms = (2 * SHAPE.layers + 1) * SHAPE.hidden
    return 4 * (embedding + (blocks + head) // 2 + norms + samples * largest)


@pytest.mark.parametrize("is_slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_losses_are_those_of_the_cpu_and_memory_is_that_of_the_plan(tmp_path: Path, is_slow: bool) -> None:
    names = [name for name in (*FEATURES, *INFERENCE) if (name in SLOW) == is_slow]
    devices = run_ranks(_all_on_devices, 2, str(tmp_path), names, backend=None)
    on_cpu = run_ranks(_all, 2, str(tmp_path), names)
    wrong = []
    for number, name in enumerate(names):
        for place in (0, 1) if name == "pipeline" else (number % 2,):
            found = devices[place][name]
            if not torch.allclose(*(torch.tensor(run[place][name]["losses"]) for run in (devices, on_cpu)), rtol=1e-4):
                wrong.append(f"{name}: losses {found['losses']}, on the CPU {on_cpu[place][name]['losses']}")
            wrong += [f"{name}: {line}" for line in _beyond(name, place, found, str(tmp_path))]
    assert not wrong, "\n".join(wrong)


def _beyond(name: str, place: int, found: dict[str, Any], folder: str) -> Iterator[str]:
    """What a rank holds beyond what it may, in words."""
    if name in INFERENCE:
        most = _bytes_of_inference(name)
    else:
        planned = deepspeed.plan(
            _shape(name),
            _config(name, folder),
            devices_per_node=2,
            device="h100",
            sequence_length=TOKENS,
            compare_checkpointing=False,
            suggest=False,
            rank=place,
            **FEATURES[name].get("plan", {}),
        ).simulated
        kinds = {(kind.name, tier.name): nbytes for (kind, tier), nbytes in planned.kind_peaks.items()}
        factor = EXPERTS_TOLERANCE if name == "experts" else KIND_TOLERANCE
        for key in kinds.keys() | found["kinds"].keys():
            if found["kinds"].get(key, 0) > factor * kinds.get(key, 0):
                yield f"{key}: {found['kinds'].get(key, 0):,} bytes, planned are {kinds.get(key, 0):,}"
        most = planned.peaks[Tier.DEVICE].nbytes
        if found["registered"] > KIND_TOLERANCE * planned.pinned:
            yield f"{found['registered']:,} bytes of page-locked host memory, planned are {planned.pinned:,}"
        if len(set(found["reserved"][STEPS - 2 :])) > 1:
            yield f"reserved memory grows from step to step: {found['reserved']}"
    most = int(TOLERANCE * (most + ASIDE.get(name, 0)))
    if not 0 < found["allocated"] <= most:
        yield f"{found['allocated']:,} bytes of device memory, expected at most {most:,}"
