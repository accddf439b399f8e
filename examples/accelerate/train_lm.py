"""A small GPT-2 trained with Accelerate; what DeepSpeed does comes from `accelerate config` or from a config file.

    accelerate launch --config_file plugin_stage2.yaml train_lm.py
    accelerate launch --config_file file_stage3_offload.yaml train_lm.py

The same script serves both ways: where the DeepSpeed config file has an `optimizer` and a `scheduler`, it hands over
placeholders. README.md has all commands and what one sees.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config

CONTEXT = 64  # bytes that the model sees at once


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator()
    set_seed(0)
    loader = DataLoader(pieces(args.num_pieces), batch_size=args.per_device_batch_size, shuffle=True)
    # from_config and from_pretrained under stage 3: each parameter is sharded as soon as its module is made.
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 3, "n_head": 4}
    if args.load:
        model = AutoModelForCausalLM.from_pretrained(args.load)
    else:
        model = AutoModelForCausalLM.from_config(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    if args.only_evaluate:
        model, loader = accelerator.prepare(model, loader)  # ZeRO inference: no optimizer
        return accelerator.print(f"loss {evaluate(accelerator, model, loader):.3f} nats per byte")

    # Before prepare the loader still counts the batches of all ranks together.
    steps = args.num_epochs * math.ceil(len(loader) / accelerator.num_processes)
    optimizer, scheduler = make_optimizer(accelerator, model, steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.print(f"{accelerator.num_processes} rank(s), ZeRO stage {accelerator.deepspeed_plugin.zero_stage}")
    train(accelerator, model, optimizer, scheduler, loader, args.num_epochs)
    if args.output_dir:
        save(accelerator, model, args.output_dir)


def make_optimizer(accelerator: Accelerator, model: torch.nn.Module, steps: int):
    """The script's own optimizer and schedule, or placeholders for those of the config file."""
    config = accelerator.deepspeed_plugin.deepspeed_config
    decayed = [p for n, p in model.named_parameters() if not (n.endswith("bias") or ".ln_" in n)]
    others = [p for n, p in model.named_parameters() if n.endswith("bias") or ".ln_" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer_class = DummyOptim if "optimizer" in config else torch.optim.AdamW
    optimizer = optimizer_class(groups, lr=2e-3)
    if "scheduler" in config:
        return optimizer, DummyScheduler(optimizer, total_num_steps=steps, warmup_num_steps=max(1, steps // 10))
    # Accelerate advances a schedule of the script once for every rank in each step, the engine its own once.
    total = steps * (1 if optimizer_class is DummyOptim else accelerator.num_processes)

    def schedule(optimizer):
        return LambdaLR(optimizer, lambda done: min(1.0, 10 * (done + 1) / total) * (1 - done / (total + 1)))

    if optimizer_class is DummyOptim:  # there is no optimizer yet to build a schedule on
        return optimizer, DummyScheduler(optimizer, lr_scheduler_callable=schedule)
    return optimizer, schedule(optimizer)


def train(accelerator, model, optimizer, scheduler, loader, num_epochs: int) -> None:
    model.train()
    for epoch in range(num_epochs):
        total = 0.0
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.item()
        accelerator.print(f"epoch {epoch}: loss {total / len(loader):.3f} nats per byte", flush=True)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    model.eval()
    losses = [model(input_ids=batch, labels=batch).loss.repeat(len(batch)) for batch in loader]
    return accelerator.gather_for_metrics(torch.cat(losses)).float().mean().item()


def save(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> None:
    """Both ways of the documentation: the 16-bit weights now, and a checkpoint that gives fp32 weights later."""
    # 1. All ranks take part in collecting the weights; rank 0 writes them. from_pretrained reads the folder.
    accelerator.unwrap_model(model).save_pretrained(
        folder / "weights_16bit",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    # 2. Every rank writes its shard. `python zero_to_fp32.py . fp32` in that folder, or
    #    load_state_dict_from_zero_checkpoint(model, folder), makes one fp32 state of them.
    model.save_checkpoint(folder / "checkpoint", client_state={"note": "anything of the script's own"})
    accelerator.wait_for_everyone()


def pieces(count: int) -> torch.Tensor:
    """Bytes of the Python library, cut into ``count`` pieces: int64 of shape (count, CONTEXT)."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-e]*.py")))
    return torch.frombuffer(bytearray(text[: count * CONTEXT]), dtype=torch.uint8).view(-1, CONTEXT).long()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GPT-2 with Accelerate and DeepSpeed")
    parser.add_argument("--num_pieces", type=int, default=512, help=f"pieces of {CONTEXT} bytes to learn from")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--per_device_batch_size", type=int, default=16)
    parser.add_argument("--output_dir", type=Path, help="folder to save to; without one nothing is saved")
    parser.add_argument("--load", type=Path, help="folder of weights to start with")
    parser.add_argument("--only_evaluate", action="store_true", help="no training (needs stage 3)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
