"""0/1 Adam: ranks that are brought together between two exchanges, for a save, lose nothing by it."""

from pathlib import Path
from typing import Any

import torch

from tests.engine.support import rank, same_on_all_ranks
from tests.harness import on_ranks
from tests.onebit.test_adam import engine_with
from tests.onebit.test_groups import Given, weights
from tests.onebit.test_zero_one import STEPS, make, train

FREEZE, GAP, INTERVALS, LR = 20, 16, 3, 1e-3
LATE = {"lr": LR, "var_freeze_step": FREEZE, "var_update_scaler": FREEZE, "bias_correction": True}
LATE |= {"local_step_scaler": 1, "local_step_clipper": GAP}


def errors(engine: Any) -> torch.Tensor:
    return torch.cat([bucket.private.tensor for bucket in engine.inspect().driver.buckets])


def mean(values: dict[str, torch.Tensor]) -> torch.Tensor:
    flat = torch.cat([value.flatten() for value in values.values()])
    torch.distributed.all_reduce(flat)
    return flat / torch.distributed.get_world_size()


@on_ranks(2)
def test_a_save_between_exchanges_loses_nothing(tmp_path: Path) -> None:
    """Saves after 1, 8 and 15 of 16 steps."""
    folder = str(tmp_path)
    found = []
    for saves in ((), (1, 8, 15)):
        params = {"betas": [0.9, 0.999], **LATE}
        engine = engine_with(Given(), 0, None, {"optimizer": {"type": "ZeroOneAdam", "params": params}})
        for step in range(FREEZE + INTERVALS * GAP):
            dice = torch.Generator().manual_seed(100 * step + rank())
            gradient = 0.4 + 0.8 * torch.randn(5, 400, generator=dice)
            engine.backward(engine(gradient))
            engine.step()
            if step >= FREEZE and (step + 1 - FREEZE) % GAP in saves:
                owed, stood = errors(engine).clone(), weights(engine)
                engine.save_checkpoint(f"{folder}/{len(saves)}")
                assert torch.equal(errors(engine), owed) and owed.abs().max() > 0, step
                assert same_on_all_ranks([value.tolist() for value in weights(engine).values()])
                torch.testing.assert_close(mean(weights(engine)), mean(stood), rtol=1e-6, atol=1e-8)
        found.append(mean(weights(engine)))
        engine.destroy()
    plain, saved = found
    assert plain.mean() < -0.4 * LR * INTERVALS * GAP
    # Which bits are sent differs, so weights are apart by what is owed.
    assert (saved - plain).norm() < 0.15 * plain.norm()
    assert 0.97 < saved.mean() / plain.mean() < 1.03


@on_ranks(2)
def test_weights_loaded_alone_count(tmp_path: Path) -> None:
    """Weights that are loaded without states are where the next step begins, in an interval and between two."""
    folder = str(tmp_path)
    for at in (7, 8):
        engine = make()
        for step in range(at):
            train(engine, step)
        engine.save_checkpoint(f"{folder}/{at}")
        saved = weights(engine)
        for step in range(at, STEPS + 1):
            train(engine, step)
        engine.load_checkpoint(f"{folder}/{at}", load_optimizer_states=False)
        assert all(torch.equal(value, saved[name]) for name, value in weights(engine).items())
        train(engine, STEPS + 1)
        for name, value in weights(engine).items():
            moved = (value - saved[name]).abs().max().item()
            assert 0 < moved < 0.01, (at, name, moved)
        engine.destroy()
