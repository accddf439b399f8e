"""Trains with the Trainer, Accelerate and Lightning in one process on a GPU; nothing of the libraries is mocked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.harness import run_ranks

pytestmark = pytest.mark.gpu

TOLERANCE = {"fp32": 1e-3, "bf16": 0.05}


def _on_gpu(check: Any, *args: Any) -> Any:
    """Returns what ``check`` returns in a process of its own, in which the libraries make the process group."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return run_ranks(check, 1, *args, backend=None, timeout=200, fresh="interpreter", env=place)[0]


def _trainer(folder: str, weights: str, config: Any, more: dict[str, Any]) -> list[float]:
    from transformers import Trainer

    from tests.ecosystem.transformers.runs import arguments, new_model, rows

    torch.backends.cuda.matmul.allow_tf32 = False
    given = arguments(folder, config, use_cpu=False, **more)
    trainer = Trainer(new_model(weights), given, train_dataset=rows())
    trainer.train(resume_from_checkpoint=more.get("resume_from_checkpoint"))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("stage", "offload"), [(2, False), (3, True)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trainer(stage, offload, precision, tmp_path):
    pytest.importorskip("transformers")
    from tests.ecosystem.transformers.runs import ds_config, new_model

    weights = str(tmp_path / "weights")  # read, since torch draws other numbers on a GPU than on the CPU
    new_model().save_pretrained(weights)
    plain = _on_gpu(_trainer, str(tmp_path / "plain"), weights, None, {})
    config = ds_config(stage, offload=offload)
    saves = {"save_strategy": "steps", "save_steps": 3, "bf16": precision == "bf16"}
    losses = _on_gpu(_trainer, str(tmp_path / "ours"), weights, config, saves)
    assert losses == pytest.approx(plain, rel=TOLERANCE[precision])
    saves["resume_from_checkpoint"] = str(tmp_path / "ours" / "checkpoint-3")
    resumed = _on_gpu(_trainer, str(tmp_path / "ours"), weights, config, saves)
    assert resumed[-3:] == pytest.approx(losses[-3:], rel=1e-6)


def _accelerate(folder: str, stage: int, is_low: bool) -> tuple[list[float], list[float]]:
    from accelerate import Accelerator, DeepSpeedPlugin

    from tests.ecosystem.accelerate.loops import CLIP, MICRO, Net, data, input_dtype, shard_everything

    torch.backends.cuda.matmul.allow_tf32 = False
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=CLIP)
    accelerator = Accelerator(mixed_precision="bf16" if is_low else "no", deepspeed_plugin=shard_everything(plugin))
    model: nn.Module = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(data(), batch_size=MICRO)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def epoch() -> list[float]:
        losses = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x.to(input_dtype(accelerator))).float(), y)
                losses.append(loss.item())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return losses

    first = epoch()
    accelerator.save_state(folder)
    second = epoch()
    accelerator.load_state(folder)
    assert epoch() == pytest.approx(second, rel=1e-6)
    accelerator.end_training()
    return first, second


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("is_low", [False, True])
def test_accelerate(stage, is_low, tmp_path):
    pytest.importorskip("accelerate")
    found = _on_gpu(_accelerate, str(tmp_path), stage, is_low)
    assert found[0] == pytest.approx(_by_hand(), rel=0.1 if is_low else 1e-3)


def _by_hand() -> list[float]:
    """The losses of the first epoch in plain torch on the CPU."""
    from tests.ecosystem.accelerate.loops import CLIP, MICRO, Net, data

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for number, (x, y) in enumerate(DataLoader(data(), batch_size=MICRO)):
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        (loss / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _lightning(folder: str, strategy: str, precision: str) -> list[float]:
    import lightning as L

    from tests.ecosystem.lightning.support import Lit

    torch.backends.cuda.matmul.allow_tf32 = False
    model = Lit()
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(list(zip(x, x.sum(1, keepdim=True), strict=True)), batch_size=2)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        gradient_clip_val=0.5,
        strategy=strategy,
    )
    trainer.fit(model, loader)
    return model.losses


@pytest.mark.parametrize("strategy", ["deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(strategy, precision, tmp_path):
    pytest.importorskip("lightning")
    plain = _on_gpu(_lightning, str(tmp_path), "ddp", "32-true")  # shuffles as the strategies of deepspeed do
    losses = _on_gpu(_lightning, str(tmp_path), strategy, precision)
    assert losses == pytest.approx(plain, rel=1e-3 if precision == "32-true" else 0.1)
