"""The flops profiler: counts against arithmetic done by hand, under ZeRO too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from deepspeed.profiling.flops_profiler.profile import product_formula
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler as ByLongPath
from deepspeed.profiling.flops_profiler.profiler import readable, readable_time
from tests.engine.support import WIDTH, engine_of, inputs, rank
from tests.harness import run_ranks
from tests.harness.toy_models import tower


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.rise = nn.Linear(8, 16)
        self.fall = nn.Linear(16, 4, bias=False)
        self.shared = self.rise

    def forward(self, x):
        return self.fall(torch.relu(self.rise(x)))


MACS = 3 * (8 * 16 + 16 * 4)
FLOPS = 2 * MACS + 3 * 16  # and one per element for relu
PARAMS = 8 * 16 + 16 + 16 * 4


def test_counts_of_a_small_model(tmp_path):
    file = tmp_path / "deep" / "report.txt"
    assert get_model_profile(Small(), (3, 8), as_string=False, output_file=str(file)) == (FLOPS, MACS, PARAMS)
    text = file.read_text()
    assert "(rise): Linear(in_features=8, out_features=16, bias=True): 144, 69.2%; 384 MACs, 66.7%" in text
    assert "(fall): Linear(in_features=16, out_features=4, bias=False): 64, 30.8%; 192 MACs, 33.3%" in text
    assert "depth 1:" in text and "parameters  Linear 208" in text


def test_text_and_standard_output(capsys):
    flops, macs, params = get_model_profile(Small(), args=[torch.ones(3, 8)], module_depth=0, detailed=False)
    assert (flops, macs, params) == ("1.20 KFLOPs", "576 MACs", "208")
    shown = capsys.readouterr().out
    assert (
        "forward MACs per rank" in shown and "depth 0:" in shown and "depth 1:" not in shown and "(rise)" not in shown
    )
    assert ByLongPath is FlopsProfiler
    assert readable(1_234_567, "FLOPs") == "1.23 MFLOPs" and readable(0.5) == "0.50" and readable(3) == "3"
    assert (readable_time(2.0), readable_time(0.0015), readable_time(2e-6)) == ("2.00 s", "1.50 ms", "2.00 us")


def test_numbers_as_programs_write_them():
    from deepspeed.profiling import flops_profiler as made

    assert (
        made.number_to_string(1_234_567) == "1.23 M"
        and made.number_to_string(1_500, units="M", precision=4) == "0.0015 M"
    )
    assert made.flops_to_string(2e9) == "2 GFLOPS" and made.macs_to_string(0) == "0 MACs"
    assert made.params_to_string(7e9) == "7 B" and made.params_to_string(7e9, units="M") == "7000 M"
    assert made.params_to_string(12) == "12" and made.duration_to_string(0.0042) == "4.2 ms"
    with pytest.raises(ValueError, match="units='X'"):
        made.number_to_string(1, units="X")


@pytest.mark.parametrize("ignored", [(), (nn.Linear,)])
def test_a_shared_parameter_counts_once(ignored):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignored)
    profiler.stop_profile()
    assert profiler.get_total_params() == 16


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_kinds_of_operations(context):
    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 6, 3, padding=1, bias=False)
            self.norm = nn.LayerNorm(10)

        def forward(self, image, q):
            image = self.convolution(image)
            attended = F.scaled_dot_product_attention(q, q, q)
            return image.to(torch.float64).sum(), self.norm(attended)

    model, image, q = Kinds(), torch.randn(2, 3, 10, 10), torch.randn(2, 4, 5, 10)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with context():
        model(image, q)
    profiler.stop_profile()
    convolution = 2 * 6 * 10 * 10 * 3 * 3 * 3
    attention = 2 * 4 * (5 * 5 * 10) * 2
    assert profiler.get_total_macs() == convolution + attention
    rest = profiler.get_total_flops() - 2 * (convolution + attention)
    assert rest == 5 * (2 * 4 * 5 * 10) + 2 * 6 * 10 * 10  # the norm, the sum; the cast is free
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0 and profiler.get_total_params() == 3 * 6 * 9 + 20
    profiler.end_profile()
    with pytest.raises(RuntimeError, match="measured nothing"):
        profiler.get_total_flops()


class Calls(nn.Module):
    """Calls a function of its inputs and of one weight."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(16, 16))

    def forward(self, *inputs):
        return self.function(self.weight, *inputs)


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


SAMPLES, TOKENS, HIDDEN, WIDE = 2, 5, 16, 24
ATTENTION = SAMPLES * TOKENS * 4 * HIDDEN * HIDDEN + 2 * SAMPLES * TOKENS * TOKENS * HIDDEN
ENCODER = ATTENTION + 2 * SAMPLES * TOKENS * HIDDEN * WIDE
PER_GATE = SAMPLES * TOKENS * WIDE * (HIDDEN + WIDE)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize(
    ("make", "macs"),
    [
        (lambda: SelfAttention(HIDDEN, 4, batch_first=True), ATTENTION),
        (lambda: nn.TransformerEncoderLayer(HIDDEN, 4, WIDE, dropout=0.0, batch_first=True), ENCODER),
        (lambda: nn.LSTM(HIDDEN, WIDE, batch_first=True), 4 * PER_GATE),
        (lambda: nn.LSTM(HIDDEN, WIDE, 2, bidirectional=True), 8 * (PER_GATE + SAMPLES * TOKENS * WIDE * 3 * WIDE)),
        (lambda: nn.GRU(HIDDEN, WIDE), 3 * PER_GATE),
        (lambda: Calls(lambda weight, x: weight @ x[0, 0]), HIDDEN * HIDDEN),
        (lambda: Calls(lambda _, x: x[0, 0] @ x[0, 0]), HIDDEN),
        (lambda: Calls(lambda _, x: torch.addbmm(x.new_zeros(5, 5), x, x.mT)), SAMPLES * TOKENS * TOKENS * HIDDEN),
    ],
)
def test_products_of_one_kernel_and_by_vectors(make, macs, is_training):
    """In evaluation torch runs attention and whole encoder layers as one kernel, and on the host an LSTM always."""
    model = make().train(is_training)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with torch.set_grad_enabled(is_training):
        model(torch.randn(SAMPLES, TOKENS, HIDDEN))
    profiler.stop_profile()
    assert profiler.get_total_macs() == macs


def test_products_of_samples_of_different_lengths():
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, WIDE, dropout=0.0, batch_first=True)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    inputs = {"src": torch.randn(2, 5, HIDDEN), "src_key_padding_mask": padding}
    macs = get_model_profile(nn.TransformerEncoder(layer, 1), kwargs=inputs, print_profile=False, as_string=False)[1]
    assert macs == sum(n * (4 * HIDDEN**2 + 2 * n * HIDDEN + 2 * HIDDEN * WIDE) for n in (3, 5))


class Pairs(nn.Bilinear):
    def forward(self, x):
        return super().forward(x, x)


def test_bilinear_layers_and_distances():
    x = torch.randn(3, 5, 4)
    for model, macs in (
        (Pairs(4, 4, 6), 3 * 5 * 6 * 4 * 4),
        (Calls(lambda _, x: torch.cdist(x, x[:, :2])), 3 * 5 * 2 * 4),
        (Calls(lambda _, x: torch.cdist(x, x, p=1)), 3 * 5 * 5 * 4),
        (Calls(lambda _, x: torch.cdist(x.repeat(1, 6, 1), x)), 3 * 30 * 5 * 4),
        (Calls(lambda _, x: torch.pdist(x[0])), 10 * 4),
    ):
        for mode in (torch.enable_grad, torch.inference_mode):
            with mode():
                assert get_model_profile(model, args=[x], print_profile=False, as_string=False)[1] == macs


def test_products_by_groups():
    rows, weights = torch.randn(8, 16).bfloat16(), torch.randn(2, 16, 32).bfloat16()
    model = Calls(lambda _, rows, weights: F.grouped_mm(rows, weights, offs=torch.tensor([3, 8], dtype=torch.int32)))
    assert get_model_profile(model, args=[rows, weights], print_profile=False, as_string=False)[1] == 8 * 16 * 32


def test_misuse_is_named():
    profiler = FlopsProfiler(Small())
    profiler.start_profile(ignore_list=[nn.Linear])
    with pytest.raises(RuntimeError, match="running already"):
        profiler.start_profile()
    profiler.model(torch.ones(3, 8))
    profiler.stop_profile()
    assert profiler.get_total_macs() == MACS and profiler.get_total_params() == PARAMS
    assert not profiler.model._forward_hooks and not profiler.model.rise._forward_pre_hooks
    with pytest.raises(ValueError, match="expected an input, found none"):
        get_model_profile(Small())
    with pytest.raises(ValueError, match="'forward', or 'generate'"):
        get_model_profile(Small(), (3, 8), mode="generate")


def _profile_a_step(stage, folder):
    file = f"{folder}/rank{rank()}.txt"
    section = {"enabled": True, "profile_step": 2, "output_file": file, "recompute_fwd_factor": 1.0}
    engine = engine_of(tower(), stage, accumulation=2, flops_profiler=section)
    losses = []
    for step in range(3):
        for micro in range(2):
            loss = engine(inputs(step, micro, rank()))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
    profiler = engine.flops_profiler
    totals = (profiler.get_total_macs(), profiler.get_total_params()) if profiler is not None else None
    assert profiler is None or (profiler.macs, profiler.params) == totals
    engine.destroy()
    return totals, losses


def test_the_profiled_step_of_a_training(tmp_path):
    expected = None
    for stage in (0, 3):
        folder = tmp_path / str(stage)
        folder.mkdir()
        (totals, losses), (nothing, _) = run_ranks(_profile_a_step, 2, stage, str(folder))
        macs = 2 * (WIDTH * WIDTH + 4 * 2 * WIDTH * 17 + WIDTH * 3)
        params = sum(p.numel() for p in tower().parameters())
        assert totals == (macs, params) and nothing is None
        assert [path.name for path in folder.iterdir()] == ["rank0.txt"]
        text = (folder / "rank0.txt").read_text()
        assert "flops profile of step 2" in text and "8 = 2 x 2 x 2" in text and "samples per second" in text
        for phase in ("forward", "backward", "step"):
            assert f"{phase} time of the step" in text
        expected = expected or losses
        assert losses == pytest.approx(expected, rel=1e-5)  # being watched changes nothing


def test_a_profile_that_cannot_be_written_ends_no_training(tmp_path):
    (tmp_path / "rank0.txt").mkdir()
    (totals, losses), (_, others) = run_ranks(_profile_a_step, 2, 0, str(tmp_path))
    assert totals is not None and len(losses) == len(others) == 6


@pytest.mark.parametrize("kernel", ["efficient_attention", "flash_attention", "flash_attention_for_cpu"])
def test_keys_with_fewer_heads_count_as_repeated_ones(kernel):
    query, key = torch.empty(2, 4, 5, 8, device="meta"), torch.empty(2, 2, 7, 8, device="meta")
    repeated, product = key.repeat_interleave(2, 1), 2 * 2 * 4 * 5 * 7 * 8
    forward = product_formula(getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default)
    backward = product_formula(getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward").default)
    assert forward(query, key, key, out_val=query) == forward(query, repeated, repeated, out_val=query) == 2 * product
    assert backward(query, query, key, key, out_val=query) == 5 * product
