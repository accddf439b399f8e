"""A plan of a run with codecs: bytes of error feedback, and bytes of the codes."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import deepspeed
from deepspeed.comm.base.codec import CHUNK, coded_nbytes, decode_add, encode
from deepspeed.comm.codecs.table import CODECS, CodecRow
from deepspeed.config.codec_names import GRADIENT_CODECS
from deepspeed.plan.result import Plan
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind
from tests.harness.device import simulated_device
from tests.plan.cells import SHAPE
from tests.zero.update.rounding import Rounding, rounded_transfers

PSI = 870400  # elements of the buckets of SHAPE over 8 ranks; see tests/plan/test_pure_data.py
RANKS, MICRO_BATCHES = 8, 4


def planned(stage: int) -> Plan:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.plan(
        SHAPE, config, nodes=2, devices_per_node=4, sequence_length=64, suggest=False, compare_checkpointing=False
    )


@pytest.mark.parametrize(("stage", "kept", "reductions"), [(0, PSI + PSI // RANKS, 1), (2, PSI, MICRO_BATCHES)])
def test_errors_and_codes_are_in_the_plan(
    stage: int, kept: int, reductions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CODECS, Rounding.name, CodecRow(Rounding, CHUNK, True, CODECS["int8"].work))
    plain = planned(stage)
    with rounded_transfers(None, Rounding()):
        coded = planned(stage)
    assert (
        coded.simulated.kind_peaks[StorageKind.PRIVATE, Tier.DEVICE] == 8 * kept
    )  # a skipped step leaves it as it was
    assert coded.device_bytes >= plain.device_bytes + 8 * kept
    moved = {travel.title: travel.nbytes for travel in coded.transfers}
    assert moved["swap"] == reductions * 2 * PSI * (RANKS - 1) // RANKS
    assert "error feedback" in str(coded)


class Counting(TorchDispatchMode):
    """Counts what would be kernels on a device, and the bytes of their operands and results."""

    VIEWS = ("view", "slice", "select", "expand", "alias", "detach", "unsqueeze", "_unsafe_view", "split")
    NONE = ("empty", "_local_scalar_dense", "new_empty")

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name.partition("::")[2] not in (*self.VIEWS, *self.NONE):
            self.kernels += 1
            tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
            self.nbytes += sum(one.numel() * one.element_size() for one in tensors)
        return out


@pytest.mark.parametrize("name", [*GRADIENT_CODECS, "loco"])
def test_the_work_of_codecs_is_what_they_do(name: str) -> None:
    codec, work = CODECS[name].codec(), CODECS[name].work
    numel = 2 * CHUNK
    with simulated_device():
        values, out = torch.randn(numel).bfloat16().to("cuda"), torch.zeros(numel, device="cuda")
        error = torch.zeros(numel, device="cuda") if codec.feeds_back else None
        codes = torch.zeros(coded_nbytes(codec, numel), dtype=torch.uint8, device="cuda")
        with Counting() as encoding:
            encode(codec, values, error, codes)
        with Counting() as decoding:
            decode_add(codec, codes, out)
    for half, counted in enumerate((encoding, decoding)):
        assert counted.kernels <= work.kernels[half]  # these have room for a block that is not full
        assert counted.nbytes / numel == pytest.approx(work.nbytes[half], rel=0.1)


CODED_CELLS: list[tuple[str, int, dict[str, Any]]] = [
    ("int8", 0, {}),
    ("sign", 0, {}),
    ("int4", 2, {}),
    ("sign", 3, {"zero_hpz_partition_size": 4}),
    ("int4", 3, {"mics_shard_size": 4}),
]


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize(("codec", "stage", "zero"), CODED_CELLS)
def test_bytes_by_formula_are_those_of_the_simulation(
    codec: str, stage: int, zero: dict[str, Any], device: str
) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "communication_data_type": "bf16",
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **zero},
        "communication_compression": {"gradients": codec},
    }
    plan = deepspeed.plan(
        SHAPE,
        config,
        nodes=2,
        devices_per_node=4,
        device=device,
        device_memory="8GB",
        link=1e10,
        network=1.25e8,
        sequence_length=16,
        suggest=False,
        compare_checkpointing=False,
    )
    _, requested, *_ = plan.coded_costs
    assert requested.name == codec
    moved = 0.0
    for travel in plan.transfers:  # of a gather the books have the whole buffer, of a swap what is sent
        if travel.name == "swap":
            moved += travel.nbytes
        elif travel.name == "all_gather" and (stage == 0 or ("mics_shard_size" in zero and travel.axis != "shard")):
            among = 2 if stage else 8
            moved += travel.nbytes * (among - 1) / among
    assert requested.nbytes == pytest.approx(moved, rel=0.02), plan.transfers
    if codec != "int8":
        assert requested.kept == plan.simulated.kind_peaks[StorageKind.PRIVATE, Tier.DEVICE]
    table = plan.table(120)
    assert f"{codec} (this plan)" in table and table.count("(this plan)") == 1


def test_whether_codes_pay_depends_on_the_link() -> None:
    def pays(network: float, devices: int, device: str = "h100") -> dict[str, bool]:
        found = deepspeed.plan(
            SHAPE,
            {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
            nodes=4,
            devices_per_node=devices,
            device=device,
            device_memory="8GB",
            link=4.5e11,
            network=network,
            sequence_length=16,
            suggest=False,
            compare_checkpointing=False,
        ).to_dict()["gradients"]
        return {row["as"]: row["pays"] for row in found}

    assert pays(1.25e8, 1) == {"plain": False, "int8": True, "int4": True, "sign": True}
    assert not any(pays(1e12, 1, "cpu").values())
    # Sums of the backend cross the network once for a node's eight devices; codes would have to for each.
    assert pays(1.25e7, 8) == {"plain": False, "int8": False, "int4": False, "sign": True}


def test_momenta_in_one_bit_are_compared_with_gradients() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 10}},
    }
    plan = deepspeed.plan(SHAPE, config, nodes=4, devices_per_node=1, sequence_length=16, suggest=False)
    plain, one_bit = plan.coded_costs
    assert one_bit.name == "1-bit" and 15.5 < plain.nbytes / one_bit.nbytes < 16.5
