"""One rank of the runs of test_machines.py: ``machines_train.py STAGE FOLDER FIRST LAST [up]``.

Trains from step FIRST to LAST, from the checkpoint in FOLDER unless FIRST is 0, saves there, and writes what it has
seen to ``rank<number>.json``. With ``up`` it touches ``up<number>`` after its first step, and continues much longer.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch

import deepspeed

BATCH = 12


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))


def batch_of(step):
    x = torch.rand(BATCH, 7, generator=torch.Generator().manual_seed(step))
    return x, x[:, :3].sin()


def main(stage, folder, first, last, *more):
    deepspeed.init_distributed()
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    settings = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=build(), config=settings)
    if int(first) > 0:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None and engine.global_steps == int(first), (path, engine.global_steps)
    losses = []
    for step in range(int(first), 10_000 if more else int(last)):
        x, y = (part.chunk(ranks)[rank] for part in batch_of(step))
        loss = (engine(x) - y).pow(2).mean()
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        deepspeed.comm.all_reduce(whole)
        losses.append(whole.item() / ranks)
        if more:
            Path(f"up{rank}").touch()
            time.sleep(0.05)
    engine.save_checkpoint(folder)
    seen = {"host": socket.gethostname(), "local_rank": int(os.environ["LOCAL_RANK"]), "losses": losses}
    seen |= {"run": os.environ.get("DS_RUN_ID", ""), "address": os.environ["MASTER_ADDR"]}
    Path(f"rank{rank}.json").write_text(json.dumps(seen))
    engine.destroy()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
