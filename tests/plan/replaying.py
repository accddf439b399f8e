"""Simulated steps of one decoder, and replays of events made by hand on a toy machine, for tests of the timeline."""

from dataclasses import replace

import deepspeed
from deepspeed.accelerator.devices import Device, DeviceEfficiency
from deepspeed.plan import DecoderShape
from deepspeed.plan.machine import Machine
from deepspeed.plan.prediction.device_model import DeviceModel
from deepspeed.plan.prediction.network_model import NetworkModel, RankGroup
from deepspeed.plan.timeline.operation_cost import OperationCost, OperationKind
from deepspeed.plan.timeline.replay import ReplayRunner
from deepspeed.plan.timeline.step_trace import CollectiveEvent, OperationEvent

SHAPE = DecoderShape(layers=4, hidden=2048, heads=16, vocab=8192, kv_heads=4)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


def planned(stage=3, **options):
    config = {**CONFIG, "zero_optimization": {"stage": stage}, **options.pop("config", {})}
    given = {"devices_per_node": 8, "sequence_length": 4096, "suggest": False, "compare_checkpointing": False}
    return deepspeed.plan(SHAPE, config, **{**given, **options})


PERFECT = DeviceEfficiency(bandwidth=1.0, link=1.0, network=1.0, contention=0.0, launch=0.0)
DEVICE = Device("toy", 10**9, 1e12, 1e9, 1e9, 1e9, "a test", efficiency=PERFECT)  # a second per GB
MACHINE = Machine(DEVICE, 1, 8, 10**9)
GATHER = NetworkModel(MACHINE).gather(8e9, RankGroup(8))  # about 7 s
RANKS = tuple(range(8))


def moves(seconds, is_on_host=False, stream=0):
    return OperationEvent(OperationCost("add", OperationKind.TRAFFIC, nbytes=int(seconds * 1e9)), is_on_host, stream)


def replayed(*events, **efficiency):
    device = replace(DEVICE, efficiency=replace(PERFECT, **efficiency))
    return ReplayRunner(DeviceModel(device), NetworkModel(replace(MACHINE, device=device))).run(events)


def gather(number, nbytes=8 * 10**9, axis="data", stream=0):
    return CollectiveEvent(number, "all_gather", axis, nbytes, RANKS, stream)
