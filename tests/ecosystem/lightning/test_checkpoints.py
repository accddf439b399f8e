"""Checkpoints of Lightning's Trainer under DeepSpeed: saved, resumed, tested, and turned into one file."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ecosystem.lightning.devices import run_on_devices
from tests.harness import assert_states_equal

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")

ROOT = Path(__file__).resolve().parents[3]


def _saver(folder):
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(dirpath=folder, save_top_k=-1, save_last=True, filename="{epoch}-{step}", monitor="val_loss")


def _save_and_resume(folder, cases):
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    from tests.ecosystem.lightning.support import Lit, full, loader, run, strategy, trainer

    with run(folder):
        for stage, more in cases:
            settings = {"max_epochs": 2, "enable_checkpointing": True, "accumulate_grad_batches": 2}
            place = folder / f"stage-{stage}-{len(more)}"
            straight = Lit(schedule=True)
            trainer(strategy(stage, **more), callbacks=[_saver(place)], **settings).fit(straight, loader(), loader())
            after_straight = full(straight)
            first = place / f"epoch=0-step={6 // dist.get_world_size()}.ckpt"
            assert (first / "checkpoint").is_dir() and (first / "latest").read_text() == "checkpoint"

            resumed = Lit(schedule=True)
            runner = trainer(strategy(stage, **more), **{**settings, "enable_checkpointing": False})
            runner.fit(resumed, loader(), loader(), ckpt_path=first)
            assert runner.current_epoch == 2 and runner.global_step == 12 // dist.get_world_size()
            assert resumed.losses == straight.losses[len(straight.losses) // 2 :]
            assert_states_equal(full(resumed), after_straight)

            # Testing a checkpoint needs no optimizer.
            (found,) = trainer(strategy(stage, **more)).test(
                Lit(), loader(), ckpt_path=place / "last.ckpt", verbose=False
            )
            (expected,) = trainer(strategy(stage, **more)).test(straight, loader(), verbose=False)
            assert found == expected

            single = folder / f"single-{stage}-{len(more)}.ckpt"
            if dist.get_rank() == 0:
                convert_zero_checkpoint_to_fp32_state_dict(place / "last.ckpt", single)
            dist.barrier()
            loaded = Lit.load_from_checkpoint(single, weights_only=False)
            assert loaded.hparams.lr == straight.hparams.lr
            assert_states_equal(dict(loaded.state_dict()), after_straight)
            # Outside deepspeed the file is an ordinary checkpoint.
            if dist.get_rank() == 0:
                content = torch.load(single, weights_only=False)
                assert content["epoch"] == 1 and content["hyper_parameters"]["lr"] == straight.hparams.lr


def _weights_from_one_file(folder):
    """``load_full_weights``: a single file goes into a model that stage 3 has sharded."""
    from tests.ecosystem.lightning.support import Lit, full, loader, plain, run, strategy, trainer

    with run(folder):
        trained = Lit()
        runner = plain(max_epochs=1)
        runner.fit(trained, loader())
        single = folder / "plain.ckpt"
        runner.save_checkpoint(single)
        weights = {name: value.detach().clone() for name, value in trained.named_parameters()}
        model = Lit()
        (expected,) = plain().test(trained, loader(), verbose=False)
        (found,) = trainer(strategy(3, load_full_weights=True)).test(model, loader(), ckpt_path=single, verbose=False)
        assert found == pytest.approx(expected, rel=1e-5)
        assert_states_equal(full(model), weights)
        going_on = Lit()
        runner = trainer(strategy(3, load_full_weights=True), max_epochs=2)
        runner.fit(going_on, loader(), ckpt_path=single)
        assert runner.current_epoch == 2 and going_on.losses[0] < trained.losses[0]


def _refused_checkpoints(folder):
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from tests.ecosystem.lightning.support import Lit, loader, run, strategy, trainer

    with run(folder):
        runner = trainer(strategy(2))
        runner.fit(Lit(), loader())
        runner.save_checkpoint(folder / "saved.ckpt")
        with pytest.raises(FileNotFoundError, match="not a valid DeepSpeed checkpoint"):
            trainer(strategy(2)).fit(Lit(), loader(), ckpt_path=folder / "saved.ckpt" / "checkpoint")
        (folder / "empty.ckpt" / "checkpoint").mkdir(parents=True, exist_ok=True)
        with pytest.raises(MisconfigurationException, match="unable to load the checkpoint"):
            trainer(strategy(2)).fit(Lit(), loader(), ckpt_path=folder / "empty.ckpt")


def _frozen_left_out(folder):
    from tests.ecosystem.lightning.support import Lit, full, loader, run, strategy, trainer

    class Tuned(Lit):
        def __init__(self, **more):
            super().__init__(**more)
            self.layers.requires_grad_(False)

        def configure_optimizers(self):
            return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=self.hparams.lr)

    with run(folder):
        for stage in (2, 3):
            model = Tuned()
            runner = trainer(strategy(stage, exclude_frozen_parameters=True))
            runner.fit(model, loader())
            runner.save_checkpoint(folder / f"tuned-{stage}.ckpt")
            again = Tuned()
            again.strict_loading = False
            runner = trainer(strategy(stage, exclude_frozen_parameters=True), max_epochs=2)
            runner.fit(again, loader(), ckpt_path=folder / f"tuned-{stage}.ckpt")
            assert again.losses[-1] < model.losses[0]
            assert_states_equal(full(again)["layers.0.weight"], full(model)["layers.0.weight"])


OFFLOAD = {"offload_optimizer": True}


def test_save_resume_and_convert(tmp_path):
    run_on_devices(_save_and_resume, 2, tmp_path, [(2, {}), (3, {})], timeout=120)
    # The script that lies beside a checkpoint makes the same file, without Lightning and without a launcher.
    folder = tmp_path / "stage-3-0" / "last.ckpt"
    command = [sys.executable, "zero_to_fp32.py", ".", "weights", "--max_shard_size", "100GB"]
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    weights = torch.load(folder / "weights" / "pytorch_model.bin", weights_only=True)
    single = torch.load(tmp_path / "single-3-0.ckpt", weights_only=False)["state_dict"]
    assert_states_equal(dict(weights), dict(single))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_save_and_resume_at_the_other_stages(ranks, tmp_path):
    cases = [(1, {}), (1, OFFLOAD), (2, OFFLOAD), (3, {**OFFLOAD, "offload_parameters": True})]
    cases += [(2, {}), (3, {})] if ranks == 1 else []
    run_on_devices(_save_and_resume, ranks, tmp_path, cases, timeout=200)


BODIES = [_weights_from_one_file, _refused_checkpoints, _frozen_left_out]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_on_two_ranks(body, tmp_path):
    run_on_devices(body, 2, tmp_path, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_on_one_rank(body, tmp_path):
    run_on_devices(body, 1, tmp_path, timeout=100)
