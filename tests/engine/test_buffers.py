"""Buffers take rank 0's values, whatever their strides and dtypes; a checkpoint brings them back."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.support import WIDTH, engine_of, inputs
from tests.harness import on_ranks, run_ranks


class Strided(nn.Module):
    """One buffer per kind of memory (repeated, transposed, every other element, none) and some of rare dtypes."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        values = torch.arange(start, start + 64)
        self.register_buffer("repeated", values[:WIDTH].clone()[:, None].expand(WIDTH, 5000))
        self.register_buffer("transposed", values.view(8, 8).clone().t())
        self.register_buffer("gappy", values.clone()[::2])
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("short", values[0].to(torch.int16))
        self.register_buffer("complex", torch.complex(values, values))
        self.register_buffer("conjugate", torch.complex(values, values).conj())  # a view that conjugates on reading
        self.register_buffer("negative", torch.complex(values, values).conj().imag)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) + self.repeated[:, 0]).square().mean()


@on_ranks(2)
def test_rank_0_gives_buffers_of_any_strides(tmp_path: Path) -> None:
    folder = tmp_path
    expected = dict(Strided(0.0).named_buffers())
    engine = engine_of(Strided(100.0 * dist.get_rank()), 2)
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    assert engine.module.repeated.untyped_storage().nbytes() == 4 * WIDTH  # still one element per row
    engine.save_checkpoint(folder)
    model = engine.module
    for buffer in (model.repeated[:, :1], model.transposed, model.short, model.conjugate, model.negative):
        buffer.zero_()
    engine.load_checkpoint(folder)
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    engine.backward(engine(inputs(0)))
    engine.step()
    engine.destroy()


@on_ranks(2)
def test_the_first_island_gives_buffers_of_any_strides() -> None:
    expected = dict(Strided(0.0).named_buffers())
    islands = {"size": 1, "sync_every": 2}
    engine = engine_of(Strided(100.0 * dist.get_rank()), 1, communication_compression={"islands": islands})
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    engine.destroy()


class Rotated(nn.Module):
    """Turns by angles that bf16 would round: a table in fp32, as in rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("frequencies", 1 / 10_000 ** (torch.arange(WIDTH) / WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * (4_000 * self.frequencies).cos().to(x.dtype)).float().square().mean()


def train_in_bf16(stage: int) -> tuple[float, float]:
    engine = engine_of(Rotated(), stage, bf16={"enabled": True}, zero={"stage3_param_persistence_threshold": 0})
    plain = Rotated()
    plain.layer.bfloat16()
    x = inputs(0).bfloat16()
    found, expected = engine(x), plain(x)
    engine.backward(found)
    engine.step()
    assert torch.equal(engine.module.frequencies, plain.frequencies)
    engine.destroy()
    return found.item(), expected.item()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tables_in_fp32_are_as_in_plain_torch_at_every_stage(ranks: int) -> None:
    for stage in range(4):
        for found, expected in run_ranks(train_in_bf16, ranks, stage):
            assert found == expected, stage
