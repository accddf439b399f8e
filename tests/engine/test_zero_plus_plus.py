"""ZeRO++: what ranks compute with, what becomes of their gradients in two steps, and what travels between groups."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.comm.base.codec import coded_nbytes
from deepspeed.comm.base.counters import traffic
from deepspeed.comm.codecs.table import Int4Codec
from deepspeed.config import parse
from deepspeed.engine import DeepSpeedEngine
from deepspeed.errors import DeepSpeedConfigError
from tests.engine.support import SHARDED, engine_of, inputs, rank, same_on_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import tower

BLOCK = 256


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def make(model: nn.Module, optimizer: Any = sgd, **settings: Any) -> DeepSpeedEngine:
    zero = {**SHARDED, **settings.pop("zero")}
    return engine_of(model, 3, zero=zero, optimizer=optimizer, **settings)


# -- qwZ ---------------------------------------------------------------------------------------------------------------

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 8}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


class Looking(nn.Module):
    """A trained and a frozen linear layer, of odd sizes, that show what they compute with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trained = nn.Linear(9, 43)
        self.frozen = nn.Linear(43, 37).requires_grad_(False)
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        x = self.trained(x.to(self.trained.bias.dtype))
        return self.frozen(x).float().square().mean()


@on_ranks(2, 3)
def test_everybody_computes_with_the_same_decoded_weights(ranks: int) -> None:
    precisions = list(PRECISIONS) if ranks == 2 else ["bf16"]
    for name in precisions:
        for frozen_only in (False, True) if name == "bf16" else (False,):
            key = "zero_quantized_nontrainable_weights" if frozen_only else "zero_quantized_weights"
            engine = make(Looking(), zero={key: True}, **PRECISIONS[name])
            for step in range(2):
                exact = {key: value.clone() for key, value in engine.iter_full("param")}
                engine.backward(engine(inputs(step, rank())))
                seen = engine.module.seen
                assert same_on_all_ranks({key: value.tolist() for key, value in seen.items()}), name
                for key, value in exact.items():
                    is_coded = key.startswith("frozen") or not frozen_only
                    if key.endswith("bias") and is_coded:
                        continue  # a block of its own or not, as the layout has it
                    # Half a step of the block's scale, which is at most that of the largest element of the buckets.
                    largest = max(one.abs().max().item() for one in exact.values())
                    bound = largest / 127 / 2 * 1.01 + 2**-8 * largest * (value.dtype != torch.float32)
                    distance = (seen[key].float() - value.float()).abs().max().item()
                    assert distance <= (bound if is_coded else 0.0), (name, key)
                    assert (distance > 0) == is_coded, (name, key)
                engine.step()
                assert engine.global_steps == step + 1
            # What is kept is exact: nothing of the rounding has reached the frozen weights or the masters.
            torch.manual_seed(1)
            fresh = Looking()
            for key, value in engine.iter_full("param"):
                if key.startswith("frozen"):
                    assert torch.equal(value, dict(fresh.named_parameters())[key].to(value.dtype))
            engine.destroy()


# -- qgZ and LoCo ------------------------------------------------------------------------------------------------------


def int4(values: torch.Tensor) -> torch.Tensor:
    """What four bits say of a 1-D tensor: by definition, block by block."""
    text = []
    for block in values.split(BLOCK):
        scale = block.abs().max() * (1 / 7)  # as the codec computes it
        text.append((block / scale).round() * scale if scale > 0 else torch.zeros_like(block))
    return torch.cat(text)


class Simulation:
    """All ranks in one process: gradients of flat buckets in one step over all of them, or in two."""

    def __init__(self, engine: DeepSpeedEngine, ranks: int, neighbors: int, beta: float | None) -> None:
        self.ranks, self.neighbors, self.beta = ranks, neighbors, beta
        self.model = tower()
        self.buckets = [master.bucket.layout for master in engine._runtime.masters]
        self.forget()

    def forget(self) -> None:
        groups = self.ranks // self.neighbors
        self.sent = [[torch.zeros(b.numel) for b in self.buckets] for _ in range(self.ranks)]
        self.combined = [[torch.zeros(b.numel) for b in self.buckets] for _ in range(groups)]

    def flat_gradients(self, of_rank: int, step: int) -> list[torch.Tensor]:
        model = copy.deepcopy(self.model)
        model(inputs(step, of_rank)).backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        flats = []
        for layout in self.buckets:
            flat = torch.zeros(layout.numel)
            for tile, start in zip(layout.tiles, layout.starts, strict=True):
                flat[start : start + tile.numel] = grads[tile.name].reshape(-1)
            flats.append(flat)
        return flats

    def travel(self, values: torch.Tensor, error: torch.Tensor, parts: int) -> torch.Tensor:
        """What arrives of ``values``, each of so many parts coded by itself; the error is replaced."""
        due = values + error
        text = torch.cat([int4(part) for part in due.view(parts, -1)])
        if self.beta is not None:
            error.mul_(self.beta).add_(due - text, alpha=1 - self.beta)
        return text

    def means(self, step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The mean of every bucket as the ranks find it, and the exact one."""
        by_rank = [self.flat_gradients(one, step) for one in range(self.ranks)]
        groups, near = self.ranks // self.neighbors, self.neighbors
        found, exact = [], []
        for index, layout in enumerate(self.buckets):
            total = torch.zeros(layout.numel)
            for group in range(groups):
                partial = torch.zeros(layout.numel)
                for member in range(group * near, (group + 1) * near):
                    partial += self.travel(by_rank[member][index], self.sent[member][index], near)
                if groups > 1:
                    partial = self.travel(partial, self.combined[group][index], near * groups)
                total += partial
            found.append(total / self.ranks)
            exact.append(sum(flats[index] for flats in by_rank) / self.ranks)
        return found, exact

    def step(self, step: int) -> None:
        found, exact = self.means(step)
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for layout, mean, true in zip(self.buckets, found, exact, strict=True):
                for tile, start in zip(layout.tiles, layout.starts, strict=True):
                    mine, other = (flat[start : start + tile.numel] for flat in (mean, true))
                    # The mean, tensor by tensor: neither the sum over neighbors nor over groups.
                    if self.beta is None and other.norm() > 0.1 * true.norm():
                        assert 0.6 < float(mine @ other / (other @ other)) < 1.4, tile.name
                    parameters[tile.name].sub_(0.5 * mine.view(tile.shape))


def gradients(cells: list[tuple[int, dict[str, Any] | None]]) -> None:
    ranks = torch.distributed.get_world_size()
    for neighbors, loco in cells:
        zero = {"zero_quantized_gradients": True, "zero_hpz_partition_size": neighbors if neighbors < ranks else 1}
        engine = make(tower(), zero={**zero, **({"zeropp_loco_param": loco} if loco else {})})
        simulation = Simulation(engine, ranks, neighbors, loco["err_beta"] if loco else None)
        for step in range(4):
            engine.backward(engine(inputs(step, rank())))
            engine.step()
            simulation.step(step)
            if loco and (step + 1) % loco["reset_T"] == 0:
                simulation.forget()
            expected = dict(simulation.model.named_parameters())
            for name, value in engine.iter_full("fp32"):
                torch.testing.assert_close(
                    value, expected[name].detach(), rtol=1e-5, atol=1e-6, msg=f"{neighbors}, {loco}, step {step}"
                )
            check_errors(engine, simulation, loco)
        engine.destroy()


def check_errors(engine: DeepSpeedEngine, simulation: Simulation, loco: dict[str, Any] | None) -> None:
    rows = {kind: (counted, formula) for kind, counted, formula, _ in engine.memory_report()}
    if loco is None:
        assert "error feedback" not in rows
        return
    counted, formula = rows["error feedback"]
    assert counted == formula > 0
    for index, held in enumerate(engine._runtime.reducer.buckets):
        layout = simulation.buckets[index]
        expected = simulation.sent[rank()][index]
        torch.testing.assert_close(held.feedback.tensor[: layout.numel], expected, rtol=1e-3, atol=1e-6)
        if simulation.neighbors < simulation.ranks:
            group, place = divmod(rank(), simulation.neighbors)
            part = layout.numel // simulation.neighbors
            expected = simulation.combined[group][index][place * part :][:part]
            torch.testing.assert_close(held.feedback.tensor[layout.numel :], expected, rtol=1e-3, atol=1e-6)


LOCO = {"err_beta": 0.8, "reset_T": 3}


def test_gradients_in_one_step_are_the_mean_of_their_codes() -> None:
    run_ranks(gradients, 2, [(2, None), (2, LOCO)])


def test_gradients_in_two_steps_are_the_mean_over_all_ranks() -> None:
    run_ranks(gradients, 4, [(2, None), (2, LOCO)])


# -- traffic -----------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Large enough that padding to whole blocks does not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(*(nn.Linear(160, 160) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.repeat(1, 18)[:, :160].to(self.layers[0].bias.dtype)).float().square().mean()


def sent_between_groups(neighbors: int, zero: dict[str, Any]) -> float:
    """Bytes that a rank sends to other groups in a step, by the traffic counters. Checks that later steps are equal."""
    ranks = torch.distributed.get_world_size()
    engine = make(Wide(), zero=zero, bf16={"enabled": True})
    steps = []
    for step in range(6):
        traffic.reset()
        engine.backward(engine(inputs(step, rank())))
        engine.step()
        by_axis: dict[str, int] = {}
        for (_, axis), tally in traffic.ran_along.items():
            by_axis[axis] = by_axis.get(axis, 0) + tally.nbytes
        steps.append(by_axis)
    assert steps[2] == steps[3] == steps[4] == steps[5]  # small exchanges are in them, and do not grow
    if zero.get("zero_quantized_gradients"):
        # Updated weights once, in bf16 and exact, to the other group; 4-bit codes of gradients.
        parts = [bucket.layout.numel // ranks for bucket in engine._runtime.buckets]
        assert by_axis["replicate"] == sum(2 * part + coded_nbytes(Int4Codec(feeds_back=False), part) for part in parts)
        assert by_axis["data"] < 100 * ranks  # what ranks agree on in an update
    engine.destroy()
    # Of all ranks each sends as much to every other one; with groups it is on the axis.
    return by_axis.get("replicate") or by_axis["data"] * (ranks - neighbors) / (ranks - 1)


@on_ranks(4)
def test_between_groups_a_quarter_is_sent_of_stage_3() -> None:
    plain = sent_between_groups(2, {})
    keys = ("zero_quantized_weights", "zero_quantized_gradients")
    less = sent_between_groups(2, {"zero_hpz_partition_size": 2, **dict.fromkeys(keys, True)})
    assert less <= 0.27 * plain, f"{less / plain:.3f}"
    near = sent_between_groups(2, {"zero_hpz_partition_size": 2})
    assert near > 0.27 * plain  # so it is not the neighbors alone


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_an_incomplete_section_is_refused_by_name() -> None:
    for zero, named in (
        ({"zeropp_loco_param": LOCO}, "zero_quantized_gradients"),
        ({"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}}, "reset_T"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=named):
            parse({"train_batch_size": 8, "zero_optimization": {"stage": 3, **zero}}, dp_world_size=2)
