"""The search for layouts: what it finds is not slower than anything that it should have tried."""

import itertools

import pytest

from deepspeed.accelerator.devices import DEVICES
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan import DecoderShape, Machine, ParallelLayout, StepSetup, predict_step, search_layouts
from deepspeed.plan.prediction.layout import RECOMPUTATIONS

LLAMA_8B = DecoderShape(32, 4096, 32, 128256, kv_heads=8, intermediate=14336)
LLAMA_70B = DecoderShape(80, 8192, 64, 128256, kv_heads=8, intermediate=28672)


def _machine(ranks, device="h100"):
    return Machine(DEVICES[device], -(-ranks // 8), min(ranks, 8), DEVICES[device].memory)


def test_search_finds_the_fastest_layouts_and_why_the_others_are_not():
    found = search_layouts(LLAMA_8B, _machine(16), 8192, 128)
    seconds = [each.step.seconds for each in found.best]
    assert len(found.best) == 10
    assert seconds == sorted(seconds)
    assert all(each.step.fits and each.step.setup.layout.samples == 128 for each in found.best)
    assert found.tried == sum(found.refused.values()) + len(found.best)
    assert any("do not fit" in reason for reason in found.refused)
    layout = ParallelLayout(data=16, stage=3, accumulation=8, recompute="full")
    plain = predict_step(StepSetup(LLAMA_8B, layout, _machine(16), 8192))
    assert found.best[0].step.seconds < plain.seconds


@pytest.mark.parametrize("has_fused_attention", [True, False])
def test_no_layout_outside_the_list_is_faster(has_fused_attention):
    """All degrees, stages, schedules, micro-batches and recomputations of 8 ranks and 24 samples, one by one."""
    shape = DecoderShape(12, 3072, 24, 50304, has_fused_attention=has_fused_attention)
    found = search_layouts(shape, _machine(8, "a100"), 2048, 24)
    slowest, listed = found.best[-1].step.seconds, {each.step.setup.layout for each in found.best}
    degrees = [(tensor, pipe) for tensor, pipe in itertools.product((1, 2, 4, 8), repeat=2) if tensor * pipe <= 8]
    missed = []
    for tensor, pipe in degrees:
        data = 8 // tensor // pipe
        for micro, stage, recompute in itertools.product(range(1, 25), range(4), RECOMPUTATIONS):
            steps, left = divmod(24, micro * data)
            if left or (pipe > 1 and (stage > 1 or steps < pipe)) or (stage and data == 1):
                continue
            for schedule, chunks in [("1f1b", 1)] + [("gpipe", 1), ("zb-h1", 1), ("zbv", 2)] * (pipe > 1):
                if chunks * pipe > shape.layers:
                    continue
                layout = ParallelLayout(
                    tensor=tensor, pipe=pipe, data=data, stage=stage, micro_batch=micro, accumulation=steps,
                    schedule=schedule, chunks=chunks, recompute=recompute, cuts_norms=tensor > 1,
                )  # fmt: skip
                setup = StepSetup(shape, layout, _machine(8, "a100"), 2048)
                if predict_step(setup, is_quick=True).seconds > 1.2 * slowest:
                    continue
                made = predict_step(setup)
                if made.fits and made.seconds < slowest - 1e-9 and layout not in listed:
                    missed.append((made.seconds, layout.describe()))
    assert [row for row in missed if "recompute attention" not in row[1] or not has_fused_attention] == []


def test_search_where_nothing_fits():
    with pytest.raises(DeepSpeedConfigError, match="do not fit"):
        search_layouts(LLAMA_70B, _machine(8), 8192, 64)


def test_long_sequences_are_divided_as_far_as_it_pays():
    found = search_layouts(LLAMA_8B, _machine(16), 32768, 16, base=ParallelLayout(cuts_norms=True))
    layout = ParallelLayout(context=8, data=2, stage=2, accumulation=8)
    assert found.best[0].step.seconds <= predict_step(StepSetup(LLAMA_8B, layout, _machine(16), 32768)).seconds
    short = search_layouts(LLAMA_8B, _machine(16), 8192, 16)
    assert all(each.step.setup.layout.context == 1 for each in short.best)


def test_sequences_are_divided_where_there_are_fewer_samples_than_ranks():
    found = search_layouts(LLAMA_8B, _machine(16), 8192, 8)
    layout = ParallelLayout(context=2, data=8, stage=3)
    assert found.best[0].step.seconds <= predict_step(StepSetup(LLAMA_8B, layout, _machine(16), 8192)).seconds


def test_sequences_exchanged_for_heads_need_heads_for_all_ranks():
    base = ParallelLayout(is_ring=False, cuts_norms=True)
    found = search_layouts(DecoderShape(8, 1024, 8, 32000), _machine(16), 65536, 4, base=base)
    layouts = [each.step.setup.layout for each in found.best]
    assert max(layout.context for layout in layouts) > 1
    assert all(8 % (layout.tensor * layout.context) == 0 for layout in layouts)
