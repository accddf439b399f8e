"""Accelerate's loop with layers that ranks share: batches, numbers and what is saved are those of plain torch."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.ecosystem.accelerate import loops
from tests.ecosystem.support import needs_transformers, on_cpu_ranks
from tests.harness import run_ranks

pytestmark = needs_transformers

SPECS = [{"patterns": [r"body\.0\."]}, {"patterns": [r"body\.2\."], "partition_type": "row"}]


def _accelerator(stage):
    from accelerate import Accelerator, DeepSpeedPlugin

    config = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": loops.ACCUMULATION, "gradient_clipping": loops.CLIP,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 3},
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": SPECS}},
    }  # fmt: skip
    return Accelerator(deepspeed_plugin=loops.shard_everything(DeepSpeedPlugin(hf_ds_config=config)))


@on_cpu_ranks
def _train_save_resume(stages, folder):
    from tests.ecosystem.support import forget_runs

    rank, data = dist.get_rank(), dist.get_world_size() // 2
    for stage in stages:
        forget_runs()
        accelerator = _accelerator(stage)
        net = loops.Net()

        def make(parameters):
            return torch.optim.AdamW(parameters, lr=loops.LR)

        expected_net, expected = loops.plain(net, make, rank // 2, data, epochs=2)
        engine, optimizer, batches = accelerator.prepare(net, make(net.parameters()), loops.loader())
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


@pytest.mark.slow
def test_two_ranks_share_layers_and_two_the_batch(tmp_path):
    run_ranks(_train_save_resume, 4, (0, 1, 2, 3), str(tmp_path), timeout=240)
