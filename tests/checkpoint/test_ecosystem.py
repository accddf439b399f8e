"""The real Accelerate, Transformers and Lightning save, resume and convert; skipped where they are not installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ACCELERATE = """
from accelerate import Accelerator, DeepSpeedPlugin
plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0, zero3_save_16bit_model=True)
accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
batches = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)

def train(count):
    losses, iterator = [], iter(batches)
    for _ in range(count):
        x, y = next(iterator)
        loss = (model(x.to(torch.bfloat16)).float() - y).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

train(4)
accelerator.save_state("state", client_state={"epoch": 3})
straight = train(3)
accelerator.load_state("state")
assert train(3) == straight
weights = accelerator.get_state_dict(model)
assert {name: tuple(value.shape) for name, value in weights.items()}["2.weight"] == (1, 16)
accelerator.save_model(model, "model")
assert os.listdir("model") == ["model.safetensors"] and os.path.isdir("state/pytorch_model")
"""

TRANSFORMERS = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
auto = dict.fromkeys
config = {
    **auto(["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"], "auto"),
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "AdamW", "params": auto(["lr", "betas", "eps", "weight_decay"], "auto")},
    "scheduler": {"type": "WarmupLR", "params": auto(["warmup_min_lr", "warmup_max_lr", "warmup_num_steps"], "auto")},
}

def make():
    arguments = TrainingArguments(
        "out", deepspeed=config, max_steps=6, per_device_train_batch_size=2, save_steps=2, logging_steps=1,
        report_to=[], bf16=True, use_cpu=True, disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(64, (8,), generator=generator) for _ in range(40)]
    return Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])

def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

straight = make()
straight.train()
resumed = make()
resumed.train(resume_from_checkpoint="out/checkpoint-4")
assert losses(resumed) == losses(straight)
assert os.path.isdir("out/checkpoint-4/global_step4")
"""

LIGHTNING = """
import pathlib
import lightning as L
import deepspeed
from deepspeed.checkpoint import restricted
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

class Lit(L.LightningModule):
    def __init__(self, width=8, path=None):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 8)), batch_size=4)
callbacks = [ModelCheckpoint(dirpath="best", monitor="loss", save_top_k=2), EarlyStopping("loss")]
trainer = L.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, callbacks=callbacks, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Lit(8, pathlib.Path("/somewhere")), batches)
dumped = trainer._checkpoint_connector.dump_checkpoint(False)
state = {key: value for key, value in dumped.items() if key not in ("state_dict", "optimizer_states")}
assert restricted.split(state)[1] == {}, "all of it comes back without running code"
settings = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW"}}
model = Lit()
weight = model.layer.weight.detach().clone()
engine = deepspeed.initialize(model=model, config=settings)[0]
engine.save_checkpoint("saved", client_state=state, tag="checkpoint", exclude_frozen_parameters=False)
converted = convert_zero_checkpoint_to_fp32_state_dict("saved", "converted.ckpt")
assert set(state) <= set(converted)
assert torch.equal(Lit.load_from_checkpoint("converted.ckpt", weights_only=False).layer.weight, weight)
_, found = engine.load_checkpoint("saved", load_lr_scheduler_states=False)
assert set(state) <= set(found)
"""

PREAMBLE = "import os, sys\nimport torch\ntorch.manual_seed(0)\nstage = int(sys.argv[1])\n"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("package", "script"),
    [("accelerate", ACCELERATE), ("transformers", TRANSFORMERS), ("lightning", LIGHTNING)],
    ids=["accelerate", "transformers", "lightning"],
)
def test_with_the_real_package(package, script, stage, tmp_path):
    needed = [package] if package != "transformers" else ["transformers", "accelerate"]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environ = {**os.environ, **place, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    if package == "accelerate":
        environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script, str(stage)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
