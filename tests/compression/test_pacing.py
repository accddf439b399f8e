"""Eigenvalues of blocks against those of a Hessian written out, and the bits that fall by them."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.compression import compression_state, init_compression
from deepspeed.compression.eigenvalue import PowerIteration, as_shares
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.runtime.eigenvalue import Eigenvalue
from tests.compression.test_stages import technique
from tests.engine.support import adamw, engine_of, inputs, rank, same_on_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import Tower, tower

BITS, STEPS, SAVED, EVERY = 8, 10, 5, 2
PACED = {"enabled": True, "layer_name": "layers", "tol": 1e-3, "max_iter": 20, "gas_boundary_resolution": EVERY}


def uneven() -> Tower:
    """A tower whose second layer matters less."""
    model = tower(2)
    with torch.no_grad():
        for parameter in model.layers[1].parameters():
            parameter.mul_(0.3)
    return model


def moq(**eigenvalue: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "quantize_bits": {"start_bits": BITS, "target_bits": 4},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
        "eigenvalue": {**PACED, **eigenvalue},
    }


def dense(model: Any, block: str, batches: list[torch.Tensor]) -> float:
    """The eigenvalue of largest magnitude of the mean loss, from the whole Hessian of a block."""
    names = [name for name, _ in model.named_parameters() if name.startswith(block + ".")]
    values = dict(model.named_parameters())
    shapes = [values[name].shape for name in names]

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        own = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        losses = [torch.func.functional_call(model, own, (batch,)) for batch in batches]
        return torch.stack(losses).mean()

    flat = torch.cat([values[name].detach().flatten() for name in names])
    found = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat).double())
    return float(found[found.abs().argmax()])


# -- the value ---------------------------------------------------------------------------------------------------------


def test_the_class_against_a_hessian_written_out() -> None:
    model = uneven()
    expected = [dense(model, f"layers.{number}", [inputs(0)]) for number in range(2)]
    (7.0 * model(inputs(0))).backward(create_graph=True)
    eigenvalue = Eigenvalue(max_iter=5000, tol=1e-7, layer_name="layers", layer_num=2)
    found = eigenvalue.compute_eigenvalue(model, scale=7.0)
    assert found.keys() == {id(p) for p in model.layers.parameters()}
    for number, layer in enumerate(model.layers):
        share = abs(expected[number]) / max(map(abs, expected))
        for parameter in layer.parameters():
            assert found[id(parameter)] == (pytest.approx(share, rel=1e-3), number)
    model.zero_grad()
    model(inputs(0)).backward()
    with pytest.raises(ValueError, match=r"layers\.0 has a gradient with a graph"):
        eigenvalue.compute_eigenvalue(model)


def test_signs_zeros_and_what_is_not_finite() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

    def of(loss: torch.Tensor, **settings: Any) -> tuple[float, int]:
        return PowerIteration(**settings).dominant(torch.autograd.grad(loss, [x], create_graph=True), [x])

    curved = (torch.tensor([1.0, -4.0, 2.0]) * x**2).sum() / 2
    assert of(curved, tol=1e-7)[0] == pytest.approx(-4.0, rel=1e-5)
    assert of(curved, tol=1e-9, max_iter=3)[1] == 3
    assert of(2 * x.sum() + 0 * (x**2).sum()) == (0.0, 1)
    assert of((x * torch.inf) @ x) == (0.0, 1)
    assert as_shares([2.0, -4.0, 0.0]) == [0.5, 1.0, 1.0] and as_shares([0.0]) == [1.0]


# -- the engine --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    stage: int
    accumulation: int = 1
    is_half: bool = False


CELLS = [Cell(0), Cell(2, 2), Cell(1, is_half=True)]


def batch(cell: Cell, step: int, micro: int, of_rank: int) -> torch.Tensor:
    return inputs(step, micro, of_rank).to(torch.float16 if cell.is_half else torch.float32)


def train(engine: Any, cell: Cell, steps: range) -> list[tuple[list[float], list[int | None], float]]:
    """After each update: the eigenvalues known, the bits of both layers, the last loss."""
    found = []
    for step in steps:
        for micro in range(cell.accumulation):
            loss = engine(batch(cell, step, micro, rank()))
            engine.backward(loss)
            engine.step()
        bits = {state.name: state.bits for state in compression_state(engine.module)}
        row = [bits["layers.0.rise"], bits["layers.1.fall"], bits["last"]]
        found.append((list(engine.compression_scheduler.pace.eigenvalues), row, loss.item()))
    return found


def start(cell: Cell) -> Any:
    half = {"fp16": {"enabled": True, "initial_scale_power": 8}} if cell.is_half else {}
    return engine_of(uneven(), cell.stage, accumulation=cell.accumulation, quantize_training=moq(), **half)


def run(folder: Any) -> dict[Cell, list[tuple[list[float], list[int | None], float]]]:
    found = {}
    for number, cell in enumerate(CELLS):
        engine = start(cell)
        rows = train(engine, cell, range(SAVED))
        engine.save_checkpoint(folder / str(number))
        rows += train(engine, cell, range(SAVED, STEPS))
        assert same_on_all_ranks([row[:2] for row in rows])
        again = start(cell)
        again.load_checkpoint(folder / str(number))
        assert train(again, cell, range(SAVED, STEPS)) == rows[SAVED:], f"{cell}: resumed"
        found[cell] = rows
        engine.destroy()
        again.destroy()
    with pytest.raises(DeepSpeedConfigError, match="set the stage to 2 or less"):
        engine_of(uneven(), 3, quantize_training=moq())
    with pytest.raises(DeepSpeedConfigError, match=r"'decks'.*lists of modules in it: layers"):
        engine_of(uneven(), 0, quantize_training=moq(layer_name="decks"))
    with pytest.raises(DeepSpeedConfigError, match="expected 5 blocks in 'layers', found 2"):
        engine_of(uneven(), 0, quantize_training=moq(layer_num=5))
    with pytest.raises(DeepSpeedConfigError, match="no weight in the blocks of 'layers' has a bit width that falls"):
        engine_of(uneven(), 0, eigenvalue=PACED)
    engine = engine_of(uneven(), 1, quantize_training=moq())
    engine(inputs(0)).backward()
    with pytest.raises(CallOrderError, match=r"call engine.backward\(loss\) at the boundary"):
        engine.step()
    engine.destroy()
    return found


def of_one_process(
    model: Tower, batches: list[torch.Tensor], *, max_iter: int = 20, tol: float = 1e-3, stability: float = 1e-6
) -> list[float]:
    """What a process finds that has the batches of all ranks, with the same settings."""
    mean, found = torch.stack([model(one) for one in batches]).mean(), []
    for number, layer in enumerate(model.layers):
        parameters = list(layer.parameters())
        gradients = torch.autograd.grad(mean, parameters, create_graph=True)
        found.append(PowerIteration(max_iter, tol, stability).dominant(gradients, parameters, seed=number)[0])
    return found


def bits_of(eigenvalues: list[list[float]], block: int) -> list[int | None]:
    """By the definition: after each update, whose eigenvalues are known."""
    bits, due, found = BITS, 1, []
    for count, values in enumerate(eigenvalues):  # from the offset on
        if count >= due and bits > 4:
            bits -= 1
            due *= 2 * (1 + math.floor(4 * abs(values[block]) / max(map(abs, values))))
        found.append(bits)
    return found


def test_ranks_measure_the_mean_loss_and_periods_follow(tmp_path: Any) -> None:
    rows_of = run_ranks(run, 2, tmp_path, timeout=240)[0]
    for cell, rows in rows_of.items():
        last = cell.accumulation - 1
        model = uneven()
        if last == 0:  # the first eigenvalues are those of the initial values
            batches = [batch(cell, 0, last, of_rank).float() for of_rank in range(2)]
            assert rows[0][0] == pytest.approx(of_one_process(model, batches), rel=3e-2 if cell.is_half else 1e-3), cell
        values = [row[0] for row in rows]
        for block in range(2):
            assert [row[1][block] for row in rows] == bits_of(values, block), (cell, block)
        assert max(rows[-1][1][:2]) > rows[-1][1][2] == 4, "others fall by the step alone"
        assert values[0] == values[1] and len({tuple(value) for value in values}) > 1, "every second update"


@on_ranks(1)
def test_one_process_has_the_eigenvalue_of_both_batches() -> None:
    model = uneven()
    both = torch.cat([batch(CELLS[0], 0, 0, of_rank) for of_rank in range(2)])
    engine = engine_of(model, 0, quantize_training=moq(max_iter=3000, tol=1e-7), train_micro_batch_size_per_gpu=4)
    expected = [dense(uneven(), f"layers.{number}", [both]) for number in range(2)]
    engine.backward(engine(both))
    engine.step()
    assert engine.compression_scheduler.pace.eigenvalues == pytest.approx(expected, rel=2e-3)


@on_ranks(1)
def test_compression_training_is_paced_too_and_fused_attention_is_named() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            qkv = self.layers[0](x)[:, None]
            return nn.functional.scaled_dot_product_attention(qkv, qkv, qkv).square().mean()

    widths = {"start_bits": 8, "target_bits": 4, "quantization_period": 1}
    section = {"compression_training": {"weight_quantization": technique({"schedule_offset": 0}, widths, ["layers"])}}
    model = init_compression(Attending(), section)
    engine = engine_of(model, 0, optimizer=adamw, eigenvalue=PACED, **section)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(DeepSpeedConfigError, match=r"cannot be differentiated twice.*eager"):
        engine.backward(engine(x))
    for _ in range(3):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = engine(x)
        engine.backward(loss)
        engine.step()
    assert len(engine.compression_scheduler.pace.eigenvalues) == 1
    assert [state.bits for state in compression_state(model)] == [7]
