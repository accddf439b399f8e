"""Predicted steps against published runs, and the reader of their records."""

import json
import statistics

import pytest

from benchmarks.published_runs import RECORDS, predicted, read_records, read_runs, split
from benchmarks.scale import least_seconds
from benchmarks.scale import main as compare_records
from benchmarks.scale_bounds import SimulatedBound, bound_of
from benchmarks.scale_bounds import report as report_of_bounds
from benchmarks.scale_fit import constants, fit, limits_of, misfit, reached_of


def test_half_of_the_published_runs_is_predicted_by_what_fits_the_other():
    runs = read_runs()
    reached = reached_of(constants(), runs)
    _, tested = split(runs)
    errors: dict[str, list[float]] = {}
    for run in tested:
        errors.setdefault(run.source, []).append(abs(predicted(run, reached).seconds / run.seconds - 1))
    assert len(tested) >= 29
    assert statistics.median(error for each in errors.values() for error in each) <= 0.10
    assert max(statistics.median(each) for each in errors.values()) <= 0.20


def test_no_published_run_is_faster_than_its_bound():
    timed = [run for run in read_runs() if run.seconds is not None]
    shares = [least_seconds(predicted(run)) / run.seconds for run in timed]
    assert len(shares) == 60 and 0.5 < max(shares) < 0.9


def test_published_runs_are_not_refused():
    runs = read_runs()
    assert [run.name for run in runs if not predicted(run).fits] == []


def test_the_constants_are_those_of_a_fit_that_reaches_no_limit():
    """One round from the table moves none far; all rounds from the expected values are ``--fit``."""
    for name, value in constants().items():
        low, high = limits_of(name)
        assert low * 1.03 < value < high * 0.97, name
    half = split(read_runs())[0]
    values = fit(half, constants(), rounds=1)
    assert misfit(values, half) > 0.98 * misfit(constants(), half)


def test_neither_predictions_nor_measured_times_are_faster_than_arithmetic_at_the_peak():
    for run in read_runs():
        made = predicted(run)
        device = made.setup.machine.device
        peak = max(device.flops, device.fp8_flops if made.setup.layout.is_fp8 else 0)
        assert made.flops / peak < min(made.seconds, run.seconds or made.seconds), run.name


def test_records_that_cannot_be_predicted_have_a_reason(tmp_path):
    records = json.loads(RECORDS.read_text(encoding="utf-8"))["records"]
    like = next(record for record in records if record["id"] == "titan-8b-128-compile")

    def changed(name, **parts):
        return {**like, "id": f"other-{name}", **{key: {**like[key], **part} for key, part in parts.items()}}

    target = tmp_path / "records.json"
    made = [
        changed("hybrid", parallel={"fsdp_group": 8}),
        changed("amd", hardware={"gpu": "AMD MI300X", "memory_gb": 192}),
        changed("unknown", hardware={"gpu": "TPU v5p"}),
        changed("heads", model={"heads": None, "vocab": None}),
        changed("batch", batch={"micro_batch": 3}),
    ]
    target.write_text(json.dumps({"records": made}), encoding="utf-8")
    runs, refused = read_records(target)
    layouts = {run.name: run.setups[0] for run in runs}
    assert layouts.keys() == {"other-hybrid", "other-amd"}
    assert layouts["other-hybrid"].layout.shard_ranks == 8 and layouts["other-amd"].layout.shard_ranks is None
    assert layouts["other-amd"].machine.device.name == "mi300x"
    assert "TPU v5p" in refused["other-unknown"]
    assert refused["other-heads"] == "The source does not state heads, vocab."
    assert "not a multiple of the micro-batch" in refused["other-batch"]


def test_every_public_record_is_predicted_or_refused_with_a_sentence():
    runs, refused = read_records()
    records = json.loads(RECORDS.read_text(encoding="utf-8"))["records"]
    assert len(runs) + len(refused) == len(records) == 62
    assert refused == {"zero3-offload-1t": "The source does not state heads, vocab, ffn_hidden, global batch."}


def test_records_of_other_sources_are_read(tmp_path, capsys, monkeypatch):
    """One record of a source, with fewer facts than the public file has."""
    like = next(r for r in json.loads(RECORDS.read_text(encoding="utf-8"))["records"] if r["id"] == "sc21-39.1B")
    parallel = {"tp": 8, "pp": 2}
    before = {
        **like,
        "id": "old-1",
        "source": "arXiv 2201.00001",
        "recompute": "full",
        "measured": {"hardware_tflops_per_gpu": 138},
        "parallel": parallel,
        "notes": None,
    }
    tokens = {**before, "id": "new-1", "source": "a blog, 2024", "measured": {"tokens_per_s_per_gpu": 425.2}}
    share = {**tokens, "id": "mfu-1", "precision": "MXFP8", "measured": {"mfu_pct": 33.2}}
    small = {**share, "id": "small-1", "precision": "NVFP4"}
    target = tmp_path / "records.json"
    target.write_text(json.dumps({"records": [before, tokens, share, small]}), encoding="utf-8")
    runs, refused = read_records(target)
    assert refused == {"small-1": "Products in 4 bits have no rate in the table of devices."}
    assert [run.seconds for run in runs] == pytest.approx([14.45] * 3, rel=0.01)
    old, new, mfu = (run.setups[0] for run in runs)
    assert not old.shape.has_fused_attention and new.shape.has_fused_attention
    assert mfu.layout.is_fp8 and not new.layout.is_fp8
    assert {setup.layout.chunks for setup in runs[0].setups} == {1, 2, 3, 4}, "the source does not say"
    monkeypatch.setattr("sys.argv", ["scale", "--records", str(target)])
    compare_records()
    assert "mfu none of 1" in capsys.readouterr().out


def test_torchtitan_has_as_many_micro_batches_as_stages():
    run = next(run for run in read_runs() if run.name == "titan-405b-Interleaved-1F1B")
    assert [(s.layout.micro_batch, s.layout.accumulation) for s in run.setups] == [(4, 8)]


def test_a_bound_of_a_simulated_plan_is_below_the_published_time():
    run = next(run for run in read_runs() if run.name == "mosaic-a100-80-roce-125m-2048-8")
    found = bound_of(run)
    assert found.bound is not None and 0.1 * run.seconds < found.bound < run.seconds
    above = SimulatedBound("too fast", 1.0, 1.5, "arithmetic", 0.0)
    none = SimulatedBound("refused", 1.0, None, "a sentence", 0.0)
    text = report_of_bounds([found, above, none])
    assert "2 of 3 runs simulated. The highest bound is 150% of its time. Above their times: too fast." in text
    assert "| refused | 1 | not simulated | | a sentence |" in text
