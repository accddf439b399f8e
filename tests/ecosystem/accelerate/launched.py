"""Started by ``accelerate launch`` in the tests: trains a few updates and writes what it saw, a file per rank."""

import json
import sys

import torch

from tests.ecosystem.accelerate import loops
from tests.ecosystem.support import cpu_ranks


def main(folder: str) -> None:
    import os

    environment = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    with cpu_ranks():
        os.environ.update(environment)  # what the launcher has set
        from accelerate import Accelerator
        from accelerate.utils import DummyOptim, DummyScheduler

        accelerator = Accelerator()
        net = loops.Net()
        config = accelerator.deepspeed_plugin.deepspeed_config
        optimizer = torch.optim.AdamW(net.parameters(), lr=loops.LR)
        if "optimizer" in config:
            optimizer = DummyOptim(net.parameters(), lr=loops.LR)
        schedule = DummyScheduler(optimizer, warmup_num_steps=1) if "scheduler" in config else None
        objects = [net, optimizer, loops.loader(), *([schedule] if schedule is not None else [])]
        engine, optimizer, batches, *rest = accelerator.prepare(*objects)
        record = loops.accelerated(accelerator, engine, optimizer, batches, *rest)
        found = {
            "ranks": accelerator.num_processes,
            "stage": engine.zero_optimization_stage(),
            "clipping": engine.gradient_clipping(),
            "accumulation": engine.gradient_accumulation_steps(),
            "offload": engine.zero_cpu_offload(),
            "bf16": engine.bfloat16_enabled(),
            "gather": engine.zero_gather_16bit_weights_on_model_save(),
            "losses": record.losses,
        }
        with open(os.path.join(folder, f"rank-{accelerator.process_index}.json"), "w") as file:
            json.dump(found, file)
        accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
