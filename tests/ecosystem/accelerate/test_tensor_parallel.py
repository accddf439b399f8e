"""Accelerate's loop with layers that ranks share: batches, numbers and what is saved are those of plain torch."""

import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from tests.ecosystem.accelerate import loops
from tests.ecosystem.support import needs_transformers, on_cpu_ranks
from tests.harness import run_ranks

pytestmark = needs_transformers

SPECS = [{"patterns": [r"body\.0\."]}, {"patterns": [r"body\.2\."], "partition_type": "row"}]


def _accelerator(stage, sizes=None):
    """The size of the tensor axis comes from the configuration, or from Accelerate's ``ParallelismConfig``."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import ParallelismConfig

    config = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": loops.ACCUMULATION, "gradient_clipping": loops.CLIP,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 3},
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": SPECS}},
    }  # fmt: skip
    parallelism = None
    if sizes is not None:
        del config["tensor_parallel"]["autotp_size"]
        config["train_micro_batch_size_per_gpu"] = loops.MICRO  # Accelerate prepares the loader before it looks
        parallelism = ParallelismConfig(**sizes)
    plugin = loops.shard_everything(DeepSpeedPlugin(hf_ds_config=config))
    return Accelerator(deepspeed_plugin=plugin, parallelism_config=parallelism)


@on_cpu_ranks
def _refused():
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import ParallelismConfig

    from tests.ecosystem.support import forget_runs

    config = {"train_batch_size": 2, "zero_optimization": {"stage": 0}}
    plugin = DeepSpeedPlugin(hf_ds_config={**config, "tensor_parallel": {"autotp_size": 4}})
    accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=ParallelismConfig(tp_size=2))
    with pytest.raises(DeepSpeedConfigError) as refused:
        deepspeed.initialize(model=loops.Net(), config=plugin.deepspeed_config)
    # A model beside the one that Accelerate prepares keeps its own configuration.
    engine, *_ = deepspeed.initialize(model=loops.Net(), config=config)
    assert engine.mp_world_size == 1 and accelerator.parallelism_config.tp_size == 2
    engine.destroy()
    forget_runs()
    return str(refused.value)


def test_sizes_that_contradict_the_configuration_are_refused():
    for text in run_ranks(_refused, 2):
        assert text.startswith("ParallelismConfig(tp_size=2): tensor_parallel.autotp_size is 4. Give the same number")


@on_cpu_ranks
def _hybrid(stage):
    """Replicas of shards, without layers that ranks share."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import ParallelismConfig

    plugin = DeepSpeedPlugin(hf_ds_config={"train_batch_size": 4, "zero_optimization": {"stage": stage}})
    Accelerator(deepspeed_plugin=plugin, parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))
    net = loops.Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=plugin.deepspeed_config)
    engine.destroy()
    return plugin.deepspeed_config["zero_optimization"].get("mics_shard_size")


def test_replicas_of_shards_are_mics_at_stage_3():
    assert run_ranks(_hybrid, 4, 3) == [2] * 4
    assert run_ranks(_hybrid, 4, 2) == [None] * 4


@on_cpu_ranks
def _train_save_resume(stages, folder, sizes=None):
    from tests.ecosystem.support import forget_runs

    rank, data = dist.get_rank(), dist.get_world_size() // 2
    for stage in stages:
        forget_runs()
        accelerator = _accelerator(stage, sizes)
        net = loops.Net()

        def make(parameters):
            return torch.optim.AdamW(parameters, lr=loops.LR)

        expected_net, expected = loops.plain(net, make, rank // 2, data, epochs=2)
        engine, optimizer, batches = accelerator.prepare(net, make(net.parameters()), loops.loader())
        assert engine.mp_world_size == 2 and type(engine.basic_optimizer) is torch.optim.AdamW
        assert engine.train_batch_size() == loops.MICRO * loops.ACCUMULATION * data
        assert accelerator.deepspeed_config["train_batch_size"] == loops.MICRO * loops.ACCUMULATION * data * 2
        first = loops.accelerated(accelerator, engine, optimizer, batches)
        accelerator.save_state(os.path.join(folder, f"state{stage}"))
        for _ in range(2):
            second = loops.accelerated(accelerator, engine, optimizer, batches)
            both = loops.Record(*(getattr(first, n) + getattr(second, n) for n in ("losses", "norms", "rates")))
            loops.assert_same(both, expected)
            found = accelerator.get_state_dict(engine)
            assert (found is None) == (rank > 0)
            accelerator.save_model(engine, os.path.join(folder, f"model{stage}"))
            accelerator.wait_for_everyone()
            if rank == 0:
                written = load_file(os.path.join(folder, f"model{stage}", "model.safetensors"))
                assert list(found) == list(expected_net.state_dict())
                for key, value in expected_net.state_dict().items():
                    torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
                    assert torch.equal(written[key], found[key])
            accelerator.load_state(os.path.join(folder, f"state{stage}"))  # and again, from the middle
        engine.destroy()


def test_two_ranks_share_layers(tmp_path):
    run_ranks(_train_save_resume, 2, (0, 1, 2, 3), str(tmp_path))


def test_two_ranks_share_layers_by_a_parallelism_config(tmp_path):
    run_ranks(_train_save_resume, 2, (0, 1, 3), str(tmp_path), {"tp_size": 2})


@pytest.mark.slow
def test_two_ranks_share_layers_and_two_the_batch_by_a_parallelism_config(tmp_path):
    sizes = {"tp_size": 2, "dp_shard_size": 2}
    run_ranks(_train_save_resume, 4, (1, 3), str(tmp_path), sizes, timeout=240)


@pytest.mark.slow
def test_two_ranks_share_layers_and_two_the_batch(tmp_path):
    run_ranks(_train_save_resume, 4, (0, 1, 2, 3), str(tmp_path), timeout=240)
