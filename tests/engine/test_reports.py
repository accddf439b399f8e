"""What an engine reports of its settings and precision."""

import pytest
import torch

from deepspeed.config import parse
from deepspeed.engine import initialize
from deepspeed.engine.reports import state_text
from tests.engine.support import SHARDED, inputs, rank
from tests.harness import run_ranks
from tests.harness.toy_models import tower

# What an engine logs about itself.


def test_the_state_shows_functions_of_the_configuration_as_text():
    optimizer = {"type": "SGD", "params": {"lr": 0.5}}
    scheduler = {"type": "LambdaLR", "params": {"lr_lambda": [abs]}}
    root = parse({"train_batch_size": 8, "optimizer": optimizer, "scheduler": scheduler}).root
    text = state_text(root, torch.device("cpu"), [], [])
    assert '"lr": 0.5' in text and str(abs) in text and '"train_batch_size": 8' in text


def test_the_state_shows_no_secret():
    root = parse({"train_batch_size": 8, "comet": {"enabled": True, "api_key": "hidden", "project": "shown"}}).root
    text = state_text(root, torch.device("cpu"), [], [])
    assert "shown" in text and "hidden" not in text


# ``engine.precision_report()`` against the dtypes that are really there, for every mode.


MODES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 8}},
    "bf16 summed in bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "bf16 sent as fp32": {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
    "fp32 sent as bf16": {"communication_data_type": "bf16"},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def _observe(stage, mode, accumulation):
    model = tower()
    groups = [
        {"params": list(model.layers.parameters())},
        {"params": [*model.first.parameters(), *model.last.parameters()], "lr": 0.1},
    ]
    zero = {"stage": stage, **(SHARDED if stage == 3 else {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
        **MODES[mode],
    }
    engine, *_ = initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config)
    reducer, sent, summed = engine._runtime.reducer, set(), set()
    transport = engine._runtime.groups["data"].reduce
    for name in ("reduce_scatter", "all_reduce"):
        setattr(transport, name, _noting(getattr(transport, name), sent))
    for micro in range(accumulation):
        engine.backward(engine(inputs(0, micro, rank())))
        if micro < accumulation - 1:
            for gradients in reducer.buckets:
                buffers = (gradients.sum.local, gradients.sum.reduced)
                summed |= {str(buffer.tensor.dtype) for buffer in buffers if buffer is not None}
        engine.step()
    rows = engine.precision_report()
    assert [row["param_group"] for row in rows] == [0, 1]
    for row in rows:
        runs = [r for m in engine._runtime.masters for r in m.runs if r.interval.param_group == row["param_group"]]
        buckets = [
            m.bucket
            for m in engine._runtime.masters
            if any(tile.param_group == row["param_group"] for tile in m.layout.tiles)
        ]
        assert row["compute"] == sorted({str(bucket.full.tensor.dtype) for bucket in buckets})
        assert row["compute"] == sorted({str(p.dtype) for bucket in buckets for p in bucket.params})
        if runs:  # a rank may own nothing of a small group
            assert row["master"] == sorted({str(run.param.dtype) for run in runs})
            states = [v for run in runs for v in engine.basic_optimizer.state[run.param].values()]
            assert row["state"] == sorted({str(v.dtype) for v in states if v.dim()})
        if sent:
            assert set(row["reduce"]) == sent, (row, sent)
        if summed:
            assert {row["accumulate"]} == summed, (row, summed)
        if mode != "autocast" and accumulation == 1:
            assert {str(engine.communication_data_type)} == set(row["reduce"])
    assert (engine.get_type(), engine.get_mom()) == ([0.0] * 2, [(0.9, 0.999)] * 2)
    return rows, sorted(sent), sorted(summed)


def _noting(function, sent):
    def noted(flat, *args, **kwargs):
        sent.add(str(flat.dtype))
        return function(flat, *args, **kwargs)

    return noted


@pytest.mark.parametrize("mode", MODES)
def test_what_is_reported_is_what_is_there(mode):
    for stage in range(4):
        rows, sent, summed = run_ranks(_observe, 2, stage, mode, 2)[0]
        assert sent and summed, "the observation saw something"
        assert [row["param_group"] for row in rows] == [0, 1]


def test_one_rank():
    for mode in ("fp32", "bf16", "fp16"):
        run_ranks(_observe, 1, 1, mode, 2)


def _expected(mode):
    rows, _, _ = _observe(1, mode, 1)  # with accumulation the sum travels, in the dtype in which it was added up
    return {key: rows[0][key] for key in ("compute", "accumulate", "reduce", "master")}


@pytest.mark.parametrize(
    ("mode", "compute", "accumulate", "reduce", "master"),
    [
        ("fp32", "float32", "float32", "float32", "float32"),
        ("bf16", "bfloat16", "float32", "bfloat16", "float32"),
        ("fp16", "float16", "float32", "float16", "float32"),
        ("fp32 sent as bf16", "float32", "float32", "bfloat16", "float32"),
    ],
)
def test_the_modes_do_what_the_reference_describes(mode, compute, accumulate, reduce, master):
    found = run_ranks(_expected, 2, mode)[0]
    assert found["compute"] == [f"torch.{compute}"] and found["master"] == [f"torch.{master}"]
    assert found["accumulate"] == f"torch.{accumulate}" and f"torch.{reduce}" in found["reduce"]
