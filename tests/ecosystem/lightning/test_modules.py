"""Hooks of a LightningModule: building under zero.Init, manual optimization, the package's optimizers, callbacks."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ecosystem.lightning.devices import run_on_devices
from tests.harness import assert_states_equal

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")


def _reference(optimizer=torch.optim.AdamW):
    from tests.ecosystem.lightning.support import Lit, loader, plain

    model = Lit(optimizer=optimizer)
    plain().fit(model, loader())
    return model.losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def _configure_model(folder):
    from deepspeed.runtime.zero.partition_parameters import is_zero_param
    from tests.ecosystem.lightning.support import Linear, Lit, full, layers, loader, run, strategy, trainer

    class Built(Lit):
        def __init__(self, **more):
            super().__init__(**more)
            self.layers = self.head = None

        def configure_model(self):
            if self.head is not None:
                return  # called again by every entry point of the trainer
            self.layers, self.head = layers(), Linear(331, 1)
            self.are_sharded = [is_zero_param(parameter) for parameter in self.parameters()]

    with run(folder):
        losses, weights = _reference()
        for stage in (1, 2, 3):
            model = Built()
            runner = trainer(strategy(stage))
            runner.fit(model, loader(), loader())
            is_sharded = stage == 3 and dist.get_world_size() > 1
            assert set(model.are_sharded) == {is_sharded}, "stage 3 shards each layer as it is made"
            assert model.losses == pytest.approx(losses, rel=1e-4)
            assert_states_equal(full(model), weights, rtol=2e-4, atol=2e-5)
            trainer(strategy(stage)).test(model, loader(), verbose=False)
        half = Built()
        trainer(strategy(3), precision="bf16-mixed").fit(half, loader())
        assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def _configure_sharded_model(folder):
    """The hook that older scripts have, used as they do: it puts together parts that were made outside."""
    from tests.ecosystem.lightning.support import Lit, full, loader, run, strategy, trainer

    class Older(Lit):
        def configure_sharded_model(self):
            self.block = nn.Sequential(self.layers, self.head)

        def forward(self, x):
            return self.block(x)

    with run(folder):
        losses, weights = _reference()
        offloads = {"offload_optimizer": True, "offload_parameters": True}
        nvme = {"offload_params_device": "nvme", "offload_optimizer_device": "nvme", "remote_device": "nvme"}
        for stage, more in ((2, {}), (3, {}), (3, offloads), (3, {**offloads, **nvme, "nvme_path": "local_scratch"})):
            model = Older()
            trainer(strategy(stage, **more)).fit(model, loader())
            assert model.losses == pytest.approx(losses, rel=1e-4)
            assert_states_equal(full(model), weights, rtol=2e-4, atol=2e-5)


def _manual_optimization(folder):
    from tests.ecosystem.lightning.support import Lit, full, loader, plain, run, strategy, trainer

    class Manual(Lit):
        """Two backward passes for each update."""

        def __init__(self, **more):
            super().__init__(**more)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer, schedule = self.optimizers(), self.lr_schedulers()
            for _ in range(2):
                loss = self.loss(batch)
                self.manual_backward(loss / 2)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            self.losses.append(loss.item())
            self.rate = optimizer.param_groups[0]["lr"]

    with run(folder):
        reference = Manual(schedule=True)
        plain().fit(reference, loader())
        for stage in (0, 1, 2, 3):
            model = Manual(schedule=True)
            runner = trainer(strategy(stage))
            runner.fit(model, loader())
            assert model.losses == pytest.approx(reference.losses, rel=1e-4), stage
            assert model.rate == reference.rate and runner.global_step == len(model.losses)
            assert_states_equal(full(model), dict(reference.state_dict()), rtol=2e-4, atol=2e-5)


def _own_optimizers(folder):
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from tests.ecosystem.lightning.support import Lit, full, loader, run, strategy, trainer

    with run(folder):
        losses, weights = _reference()
        cases = [(FusedAdam, 2, {}), (FusedAdam, 3, {})]
        cases += [(DeepSpeedCPUAdam, stage, {"offload_optimizer": True}) for stage in (1, 2, 3)]
        for optimizer, stage, more in cases:

            class Own(Lit):
                def configure_optimizers(self, optimizer=optimizer):
                    return optimizer(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)

            model = Own()
            runner = trainer(strategy(stage, **more))
            runner.fit(model, loader())
            assert type(runner.strategy.deepspeed_engine.basic_optimizer) is optimizer
            assert model.losses == pytest.approx(losses, rel=1e-4), (optimizer, stage)
            assert_states_equal(full(model), weights, rtol=2e-4, atol=2e-5)


def _callbacks(folder):
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelSummary
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.utilities.model_summary import DeepSpeedSummary

    from tests.ecosystem.lightning.support import Lit, loader, run, strategy, trainer

    with run(folder):
        for stage in (2, 3):
            model = Lit(schedule=True)
            logger = CSVLogger(folder, name=f"stage-{stage}")
            callbacks = [LearningRateMonitor("step"), EarlyStopping("val_loss", patience=1), ModelSummary(max_depth=2)]
            runner = trainer(
                strategy(stage), logger=logger, log_every_n_steps=1, max_epochs=2, callbacks=callbacks,
                enable_model_summary=True,
            )  # fmt: skip
            runner.fit(model, loader(), loader())
            assert "val_loss" in runner.callback_metrics and "train_loss" in runner.callback_metrics
            if dist.get_rank() == 0:
                text = (folder / f"stage-{stage}" / "version_0" / "metrics.csv").read_text()
                assert "lr-" in text.splitlines()[0], text.splitlines()[0]
        summary = DeepSpeedSummary(model, max_depth=-1)
        count = sum(parameter.ds_numel for parameter in model.parameters())
        assert summary.total_parameters == count and summary.trainable_parameters == count
        # Each rank has its part of the large layer and all of the small ones.
        shares = dict(zip(summary.layer_names, summary.parameters_per_layer, strict=True))
        assert shares["head"] == 332
        assert abs(shares["layers.2"] - 331 * 332 / dist.get_world_size()) <= 128  # slices start at multiples of 64


def _refusals(folder):
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from tests.ecosystem.lightning.support import Lit, loader, run, strategy, trainer

    class Two(Lit):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    with run(folder):
        with pytest.raises(RuntimeError, match="multiple optimizers"):
            trainer(strategy(2)).fit(Two(), loader())
        with pytest.raises(MisconfigurationException, match="by value"):
            trainer(strategy(2), gradient_clip_algorithm="value", gradient_clip_val=1.0).fit(Lit(), loader())
        # The same process continues with a model that trains.
        model = Lit()
        trainer(strategy(2)).fit(model, loader())
        assert model.losses[-1] < model.losses[0]


BODIES = [_configure_model, _configure_sharded_model, _manual_optimization, _own_optimizers, _callbacks, _refusals]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_on_two_ranks(body, tmp_path):
    run_on_devices(body, 2, tmp_path, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_on_one_rank(body, tmp_path):
    run_on_devices(body, 1, tmp_path, timeout=100)
