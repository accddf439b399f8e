"""Gradients and weights that are sent as codes."""

import itertools
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.comm.base.codec import coded_nbytes
from deepspeed.comm.base.counters import counted
from deepspeed.comm.codecs.table import Int8Codec, SignCodec
from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.engine import DeepSpeedEngine, communication_compression, initialize
from deepspeed.zero.gradient.trial import UPDATES, Trial
from tests.config.support import only_problem, problems
from tests.engine.support import WIDTH, engine_of, inputs, rank, same_on_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.harness.logged import logged
from tests.harness.toy_models import tower

# The section ``communication_compression``: what it makes of gradients and weights, when, and what it logs.


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def compressed(stage: int, section: dict[str, Any], **settings: Any) -> DeepSpeedEngine:
    settings.setdefault("optimizer", sgd)
    return engine_of(tower(), stage, communication_compression=section, **settings)


def run_step(engine: DeepSpeedEngine, step: int) -> None:
    engine.backward(engine(inputs(step, rank())))
    engine.step()


def weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.iter_full("fp32")}


@on_ranks(2)
def test_codes_begin_at_their_step() -> None:
    with logged() as lines:
        engine, plain = compressed(2, {"gradients": "sign", "start_step": 2}), compressed(2, {})
    texts = lines.about("communication_compression")
    if rank() == 0:
        (line,) = texts
        assert "sign codes from update 3 on: 1.02 bits" in line and "with error feedback" in line
    for step in range(3):
        with logged() as lines, counted() as traffic:
            run_step(engine, step)
            moved = traffic.requested["swap"].nbytes
        run_step(plain, step)
        ours, theirs = weights(engine), weights(plain)
        equal = all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert equal is (step < 2)
        if rank() == 0:
            assert len(lines.about("as codes from now on")) == (step == 1)
        buckets = engine._runtime.reducer.buckets
        codes = sum(coded_nbytes(SignCodec(2048), g.bucket.layout.slice_numel) + g._rows.nbytes for g in buckets)
        assert moved == (codes if step == 2 else 0)
    assert same_on_all_ranks({name: value.sum().item() for name, value in weights(engine).items()})
    engine.destroy()
    with logged() as lines:
        late = compressed(0, {"gradients": "int4", "start_step": 9})
        run_step(late, 0)
        late.destroy()
    assert rank() or len(lines.about("training ends before update 10, the first with")) == 1


@on_ranks(2)
def test_early_updates_may_have_another_codec() -> None:
    """Until start_step they are sent with the codec of warm_up, bit for bit as with that codec from the start."""
    both = {"gradients": "sign", "start_step": 2, "warm_up": "int8"}
    for stage in (0, 2):
        with logged() as lines:
            engine, first = compressed(stage, both), compressed(stage, {"gradients": "int8"})
        assert rank() or any("until then as int8" in line for line in lines)
        for step in range(3):
            with counted() as traffic:
                run_step(engine, step)
                moved = traffic.requested["swap"].nbytes
            run_step(first, step)
            ours, theirs = weights(engine), weights(first)
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs) is (step < 2)
            lost = torch.cat([gradients.feedback.tensor for gradients in engine._runtime.reducer.buckets])
            assert bool(lost.any()) is (step == 2)  # what int8 loses is not kept
            codec = SignCodec(2048) if step == 2 else Int8Codec()
            buckets = engine._runtime.reducer.buckets
            codes = sum(coded_nbytes(codec, one.bucket.layout.slice_numel) for one in buckets)
            assert codes <= moved <= 1.01 * codes + 8 * sum(one._rows.nbytes for one in buckets)
        engine.destroy()
        first.destroy()


@on_ranks(2)
def test_weights_are_sent_as_codes_at_stage_3() -> None:
    engine = compressed(3, {"weights": "int8", "gradients": "int8"})
    assert engine._runtime.reducer.buckets[0].feedback is None  # int8 goes without
    with counted() as traffic:
        run_step(engine, 0)
        names = set(traffic.requested)
    assert "swap" in names
    sharded = [bucket for bucket in engine._runtime.buckets if bucket.is_sharded]
    assert sharded and all(not bucket._compute_transport.is_exact for bucket in sharded)
    assert isinstance(sharded[0]._compute_transport.codec, Int8Codec)


@on_ranks(1)
def test_one_rank_logs_that_nothing_is_sent() -> None:
    with logged() as lines:
        engine = compressed(2, {"gradients": "int4"})
    assert len(lines.about("nothing is sent")) == 1
    run_step(engine, 0)


def test_contradictions_are_refused_by_name() -> None:
    at = "communication_compression"
    assert "stage 3 only" in only_problem({at: {"weights": "int8"}, "zero_optimization": {"stage": 2}})
    assert "power of 2" in only_problem({at: {"gradients": "sign", "block": 96}})
    assert "keep one" in only_problem({at: {"gradients": "auto", "warm_up": "int8"}})
    zero = {"stage": 3, "zero_quantized_gradients": True}
    found = problems({at: {"gradients": "int4"}, "zero_optimization": zero})
    assert any(f"{at}.gradients: does the same as zero_optimization.zero_quantized_gradients" in one for one in found)


def trial_of(seconds: dict[bool, float]) -> tuple[list[bool], Trial]:
    """What a trial reports for each update, where updates take so long."""
    now, texts = 0.0, []
    trial = Trial(lambda: now)
    for _ in range(UPDATES + 3):
        texts.append(trial.next(LocalTransport()))
        now += seconds[texts[-1]] + 100.0 * (len(texts) <= 2)  # the first ones are slow
    return texts, trial


def test_a_trial_keeps_the_faster_way() -> None:
    texts, trial = trial_of({False: 2.0, True: 1.0})
    assert texts[-3:] == [True] * 3 and "takes 1 s with codes and 2 s without" in trial.outcome
    assert texts[:UPDATES].count(True) == 7 and not texts[0]
    texts, trial = trial_of({False: 1.0, True: 1.01})
    assert texts[-3:] == [False] * 3


def measured(paces: tuple[float, float, float]) -> None:
    original = communication_compression.reduction_seconds
    with logged() as lines:
        engine = compressed(0, {"gradients": "auto"})
        run_step(engine, 0)
        engine.destroy()
    assert rank() or len(lines.about("takes")) == 1  # whatever it was
    to_owner = []

    def seconds(*_args: Any, **options: Any) -> list[float]:
        to_owner.append(options["to_owner"])
        return list(paces)

    communication_compression.reduction_seconds = seconds
    try:
        for stage in (0, 1):
            compressed(stage, {"gradients": "auto"}).destroy()
        with logged() as lines:
            engine = compressed(2, {"gradients": "auto", "start_step": 1})
            for step in range(UPDATES + 3):
                run_step(engine, step)
        assert to_owner == [False, True, True]  # what is measured is what the stage does
        has_codes = paces[2] * 1.1 < paces[0]
        assert (engine._runtime.reducer.buckets[0].feedback is not None) is has_codes
        if rank() == 0:
            assert len(lines.about("communication_compression")) == 1
            assert len(lines.about("from now on: an update takes")) == has_codes
        assert same_on_all_ranks({name: value.sum().item() for name, value in weights(engine).items()})
        assert same_on_all_ranks(engine._runtime.reducer.is_coded)
        engine.destroy()
    finally:
        communication_compression.reduction_seconds = original


def test_auto_measures_the_link() -> None:
    run_ranks(measured, 2, (1.0, 0.5, 0.3))
    run_ranks(measured, 2, (1.0, 1.5, 0.95))


# Codes with everything else: stages, accumulation, clipping, precisions, no_sync, overlap, and awkward models.
#
# After one update a run whose gradients travel as codes is no further from one whose gradients travel as they are than
# the codec loses of them; what codes must not touch is equal to the bit.


ROWS, USED_ROWS = 20, 11
# Of the norm of what a rank sends: how much a codec may lose on the way there; on the way back as much again.
LOSES = {"sign": 1.0, "int8": 0.02, "int4": 0.25}


class Awkward(nn.Module):
    """Odd sizes, a tied weight, a frozen one, one that only rank 0 uses, and rows that nobody names."""

    def __init__(self, *, zeros: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(ROWS, WIDTH)
        self.rise, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.rise.weight
        self.frozen = nn.Linear(WIDTH, 13).requires_grad_(False)
        self.seldom = nn.Linear(13, 13)
        self.last = nn.Linear(13, 3)
        self.zeros = zeros

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.last.bias.dtype)
        names = (x.float().abs() * 7).long().sum(dim=1) % USED_ROWS
        x = self.frozen(torch.tanh(self.again(torch.tanh(self.rise(x + self.table(names))))))
        seldom = self.seldom(x.detach())
        if rank() == 0:
            x = x + seldom
        elif self.zeros:
            x = x + 0.0 * seldom
        return self.last(x).float().square().mean()


def make(stage: int, codec: str | None, model: nn.Module | None = None, **settings: Any) -> DeepSpeedEngine:
    section = {} if codec is None else {"gradients": codec, "block": 64, **settings.pop("section", {})}
    sharded = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0} if stage == 3 else {}
    zero = {**sharded, **settings.pop("zero", {})}
    return engine_of(
        model or Awkward(),
        stage,
        optimizer=lambda model: torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5),
        zero=zero,
        communication_compression=section,
        **settings,
    )


def update(engine: DeepSpeedEngine, step: int, *, holds_back: bool = False) -> None:
    steps = engine.gradient_accumulation_steps()
    for micro in range(steps):
        with engine.no_sync() if holds_back and micro < steps - 1 else nullcontext():
            engine.backward(engine(inputs(step, micro, rank(), samples=6)))
        engine.step()


def settings_of_cells() -> Iterator[tuple[int, dict[str, Any], bool]]:
    """Every stage with values that between them meet each other in pairs."""
    precisions: list[dict[str, Any]] = [
        {},
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": True, "initial_scale_power": 6}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    ]
    for stage, turn in itertools.product((0, 1, 2, 3), (0, 1)):
        precision = precisions[(stage + 2 * turn) % 4]
        overlap = bool((stage + turn) % 2)
        accumulation = 1 + (stage // 2 + turn) % 2
        holds_back = accumulation == 2 and turn == 1
        clip = 0.05 if (stage * 3 + turn) % 2 else 0.0
        cell = {"accumulation": accumulation, "gradient_clipping": clip, "zero": {"overlap_comm": overlap}, **precision}
        yield stage, cell, holds_back


def _copy(cell: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in cell.items()}


@pytest.mark.parametrize("codec", ["sign", "int8", "int4"])
@on_ranks(2)
def test_each_combination_stays_within_its_bound(codec: str) -> None:
    for stage, cell, holds_back in settings_of_cells():
        what = f"{codec}, stage {stage}, {cell}, no_sync {holds_back}"
        plain, coded = make(stage, None, **_copy(cell)), make(stage, codec, **_copy(cell))
        first = weights(plain)
        for engine in (plain, coded):
            update(engine, 0, holds_back=holds_back)
        theirs, ours = weights(plain), weights(coded)
        assert not coded.optimizer.overflow, what
        assert same_on_all_ranks({name: value.double().sum().item() for name, value in ours.items()}), what
        moved = torch.cat([(theirs[name] - first[name]).view(-1) for name in first]).norm()
        apart = torch.cat([(theirs[name] - ours[name]).view(-1) for name in first]).norm()
        assert moved > 0 and apart > 0, what
        # Each rank's gradients are not far from the mean's size, and what is lost going out may be lost coming back.
        assert apart <= 4.0 * LOSES[codec] * moved, f"{what}: {apart / moved:.3f}"
        for name in ("frozen.weight", "frozen.bias"):
            assert torch.equal(ours[name], first[name]), what
        assert torch.equal(ours["table.weight"][USED_ROWS:], first["table.weight"][USED_ROWS:]), what
        plain.destroy()
        coded.destroy()


@on_ranks(2)
def test_an_unused_parameter_counts_as_zeros_and_overlap_changes_nothing() -> None:
    stages = (0, 2, 3)
    for stage in stages:
        runs = {
            "as it is": make(stage, "sign"),
            "zeros": make(stage, "sign", Awkward(zeros=True)),
            "late": make(stage, "sign", zero={"overlap_comm": False}),
        }
        for step in range(3):
            for engine in runs.values():
                update(engine, step)
        found = {name: weights(engine) for name, engine in runs.items()}
        for other in ("zeros", "late"):
            for name, value in found["as it is"].items():
                assert torch.equal(value, found[other][name]), f"stage {stage}, {other}: {name}"
        rows = found["as it is"]["table.weight"]
        assert torch.equal(rows[USED_ROWS:], Awkward().table.weight[USED_ROWS:])  # never named, never moved
        assert not torch.equal(rows[:USED_ROWS], Awkward().table.weight[:USED_ROWS])
        for engine in runs.values():
            engine.destroy()


@on_ranks(4)
def test_groups_of_neighbors() -> None:
    """Groups of ranks (hpZ, MiCS), and weights as codes: the same weights everywhere, and close to exact."""
    kinds = ("zero_hpz_partition_size", "mics_shard_size")
    for kind, weights_as in itertools.product(kinds, (None, "int8")):
        zero = {kind: 2}
        section = {"error_feedback": True, "weights": weights_as}
        coded, plain = make(3, "int8", zero=zero, section=section), make(3, None, zero=zero)
        first = weights(plain)
        for step in range(2):
            for engine in (coded, plain):
                update(engine, step)
        ours, theirs = weights(coded), weights(plain)
        assert same_on_all_ranks({name: value.double().sum().item() for name, value in ours.items()})
        moved = torch.cat([(theirs[name] - first[name]).view(-1) for name in first]).norm()
        apart = torch.cat([(theirs[name] - ours[name]).view(-1) for name in first]).norm()
        assert 0 < apart < (0.2 if weights_as else 0.05) * moved, f"{kind}, {weights_as}: {apart / moved:.4f}"
        coded.destroy()
        plain.destroy()


# Gradients that are not finite or all zeros, tensors of one element, and phases that begin at awkward moments.


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "sign": (2, {"communication_compression": {"gradients": "sign", "block": 64}}),
    "sign later": (0, {"communication_compression": {"gradients": "sign", "start_step": 2, "warm_up": "int8"}}),
    "int8": (3, {"communication_compression": {"gradients": "int8", "error_feedback": True}}),
    "int4": (1, {"communication_compression": {"gradients": "int4"}}),
    "ZeRO++": (3, {"zero_optimization": {"zero_quantized_weights": True, "zero_quantized_gradients": True}}),
    "1-bit Adam": (0, {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "eps": 1e-3, "freeze_step": 2}}}),
    "1-bit Adam, sharded": (
        2,
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "eps": 1e-3, "freeze_step": 2}}},
    ),
    "1-bit LAMB": (0, {"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "eps": 1e-3, "freeze_step": 2}}}),
    "0/1 Adam": (
        0,
        {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.01, "eps": 1e-3, "var_freeze_step": 2}}},
    ),
}


class Tiny(nn.Module):
    """Tensors of one element, a layer whose gradients are zeros, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.tensor(0.1))
        self.zeros, self.unused = nn.Linear(WIDTH, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x.to(self.layer.bias.dtype))) * self.scale + self.shift
        return x.float().square().mean() + 0.0 * self.zeros(x).float().sum()


def make_compression_limits(name: str, **more: Any) -> DeepSpeedEngine:
    stage, option = WAYS[name]
    zero = {"stage": stage, **option.get("zero_optimization", {})}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-3}},
        "fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1},
        **option,
        "zero_optimization": zero,
        **more,
    }
    return initialize(model=Tiny(), config=config)[0]


def step(engine: DeepSpeedEngine, number: int, boost: float = 1.0, *, holds_back: bool = False) -> None:
    for micro in range(engine.gradient_accumulation_steps()):
        last = micro == engine.gradient_accumulation_steps() - 1
        with engine.no_sync() if holds_back and not last else nullcontext():
            engine.backward(engine(inputs(number, micro, rank())) * (boost if rank() == 0 else 1.0))
        engine.step()


@on_ranks(1, 3, timeout=180)
def test_what_is_not_finite_changes_nothing_and_phases_continue(tmp_path: Path) -> None:
    names = list(WAYS)
    folder = str(tmp_path)
    for name in names:
        engine = make_compression_limits(name)
        first = weights(engine)
        for number, boost in enumerate((1.0, math.inf, 1.0, math.nan, 1.0, 1.0)):
            # Update 3 is the first of the second phase; the one before it was skipped, and so is the one after.
            before = weights(engine)
            step(engine, number, boost)
            after = weights(engine)
            what = f"{name}, update {number + 1}"
            assert engine.optimizer.overflow is not math.isfinite(boost), what
            assert all(torch.equal(before[key], after[key]) for key in before) is not math.isfinite(boost), what
            assert all(bool(value.isfinite().all()) for value in after.values()), what
            for key in ("unused.weight", "unused.bias"):
                assert torch.equal(after[key], first[key]), what
            assert (after["layer.weight"] - first["layer.weight"]).abs().max() < 1, what
            if number == 1:  # just before the phase changes
                engine.save_checkpoint(f"{folder}/{name.replace('/', '-')}")
        assert same_on_all_ranks({key: value.double().sum().item() for key, value in weights(engine).items()}), name
        again = make_compression_limits(name)
        again.load_checkpoint(f"{folder}/{name.replace('/', '-')}")
        for number, boost in ((2, 1.0), (3, math.nan), (4, 1.0), (5, 1.0)):
            step(again, number, boost)
        expected, found = weights(engine), weights(again)
        assert all(torch.equal(value, found[key]) for key, value in expected.items()), name
        engine.destroy()
        again.destroy()


@on_ranks(2)
def test_accumulation_with_no_sync() -> None:
    """no_sync is accumulation: at stages without sharded gradients bit for bit."""
    names = ["sign later", "int4", "1-bit Adam", "1-bit Adam, sharded", "1-bit LAMB", "0/1 Adam"]
    for name in names:
        found = []
        for holds_back in (False, True):
            engine = make_compression_limits(name, gradient_accumulation_steps=2)
            for number in range(4):
                step(engine, number, holds_back=holds_back)
            found.append(weights(engine))
            engine.destroy()
        for key, value in found[0].items():
            assert torch.equal(value, found[1][key]), (name, key)


def moved(folder: str, saves: bool) -> None:
    """Checkpoints between sizes and between with and without codes; what is lost of errors is logged in one line."""
    names = ["sign", "int4", "1-bit Adam"]
    for name in names:
        if saves:
            engine = make_compression_limits(name)
            for number in range(3):
                step(engine, number)
            engine.save_checkpoint(f"{folder}/{name}")
            engine.destroy()
            continue
        saved: dict[str, torch.Tensor] | None = None
        for more in ({}, {"communication_compression": {}}) if name != "1-bit Adam" else ({},):
            engine = make_compression_limits(name, **more)
            with logged() as lines:
                engine.load_checkpoint(f"{folder}/{name}")
            assert len(lines.about("starts from zero")) == (rank() == 0 and not more), name
            mine = weights(engine)
            assert saved is None or all(torch.equal(value, mine[key]) for key, value in saved.items())
            saved = mine
            step(engine, 3)
            assert engine.global_steps == 4 and all(bool(v.isfinite().all()) for v in weights(engine).values())
            engine.destroy()


def test_checkpoints_between_sizes_and_ways(tmp_path: Path) -> None:
    run_ranks(moved, 3, str(tmp_path), True)
    run_ranks(moved, 2, str(tmp_path), False)
