"""``python -m on_gpu.rank_program CELL STEPS [SAVE|LOAD FOLDER]``: trains as a rank of a cell, or in torch alone.

In torch alone: ``plain:MODEL``, or ``plain:MODEL:skip``, where the second half of a batch leaves a layer out.

The last line of rank 0 is ``{"losses": [...]}``, the mean loss of the global batch at each step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from on_gpu.cells import Cell, cell_named

SAMPLES, TOKENS, WORDS = 4, 32, 128  # per step, over all ranks
LR, EPS = 1e-3, 1e-6  # with a larger rate, Adam enlarges rounding errors of small gradients
CLIP = 1.0
FAILS_AT = 3  # first step at which rank 1 is killed or leaves a layer out
Step = Callable[[torch.Tensor], float]


def main(name: str, steps: int, how: str = "", folder: str = "") -> None:
    """Trains, and prints the losses."""
    torch.backends.cuda.matmul.allow_tf32 = False
    if name.startswith("plain:"):
        step, first = _plain(*name.split(":")[1:]), 0
    else:
        step, first = _engine(cell_named(name), how, folder, steps)
    losses = [step(tokens_of(number)) for number in range(first, first + steps)]
    if how == "SAVE":
        step.engine.save_checkpoint(folder)  # type: ignore[attr-defined]
    if int(os.environ.get("RANK", "0")) == 0:
        sys.stdout.write(json.dumps({"losses": losses}) + "\n")


def tokens_of(step: int) -> torch.Tensor:
    """Returns the token ids of a step, int64 ``[SAMPLES, TOKENS]``, with a rule that can be learnt."""
    start = torch.randint(0, WORDS, (SAMPLES, 1), generator=torch.Generator().manual_seed(step))
    return (start + 5 * torch.arange(TOKENS)) % WORDS


def shifted(tokens: torch.Tensor) -> torch.Tensor:
    """Returns each token's next one; -100, which no loss counts, after the last."""
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], dim=1)


def make_model(kind: str) -> nn.Module:
    """Returns a tiny causal language model of Transformers in fp32, with the same weights on every call."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM
    from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": WORDS,
        "max_position_embeddings": TOKENS,
    }
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2))
    return LlamaForCausalLM(LlamaConfig(**shape))


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)


def _plain(kind: str, *options: str) -> Step:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = make_model(kind).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)

    layers, steps = model.model.layers, 0

    def step(tokens: torch.Tensor) -> float:
        nonlocal steps
        steps += 1
        parts = tokens.to(device).chunk(2 if options else 1)
        losses = []
        for part in parts:
            model.model.layers = layers[1:] if steps >= FAILS_AT and losses else layers
            losses.append(_loss(model(part).logits, shifted(part)) / len(parts))
        model.model.layers = layers  # the update is of all layers
        loss = torch.stack(losses).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


class _EngineStep:
    """The training step of one rank of a cell.

    Attributes:
        engine: Its engine.
    """

    def __init__(self, cell: Cell, engine: Any) -> None:
        self.engine = engine
        self._cell = cell
        self._steps = 0
        world = cell.ranks if not cell.then_on else engine.world_size
        self._replicas = world // (cell.stages * cell.sequence * cell.tensor)
        self._data_rank = engine.get_data_parallel_rank() if cell.stages == 1 else engine.grid.get_data_parallel_rank()

    def __call__(self, tokens: torch.Tensor) -> float:
        """Trains on this rank's part of the batch; returns the mean loss of the global batch."""
        self._steps += 1
        mine = tokens.chunk(self._replicas)[self._data_rank // self._cell.sequence].to(self.engine.device)
        if self._cell.stages > 1:
            loss = self.engine.train_batch(iter([(part, shifted(part)) for part in mine.split(1)]))
            return float(loss)  # a mean over all replicas
        if self._steps == FAILS_AT and self.engine.global_rank == 1:
            self._fail()
        loss = self._sequence_loss(mine) if self._cell.sequence > 1 else _loss(self.engine(mine).logits, shifted(mine))
        self.engine.backward(loss)
        self.engine.step()
        return _mean_over_ranks(loss.detach())

    def _sequence_loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the whole sequence, from this rank's part of its tokens."""
        from deepspeed.sequence import mean_loss

        size, rank = self._cell.sequence, self.engine.global_rank % self._cell.sequence
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        ids, positions, labels = (x.chunk(size, dim=1)[rank] for x in (tokens, positions, shifted(tokens)))
        logits = self.engine(input_ids=ids, position_ids=positions).logits
        return mean_loss(_loss(logits, labels), labels)

    def _fail(self) -> None:
        """Kills this rank, or leaves its first layer out."""
        if self._cell.is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._cell.skips:
            self.engine.module.model.layers = self.engine.module.model.layers[1:]


def _mean_over_ranks(loss: torch.Tensor) -> float:
    import deepspeed.comm as dist

    total = loss.float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _engine(cell: Cell, how: str, folder: str, steps: int) -> tuple[Step, int]:
    """Returns the training step of this rank, and the number of the first step."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed()
    world = int(os.environ["WORLD_SIZE"])
    samples = SAMPLES // (world // (cell.stages * cell.sequence * cell.tensor))  # of a replica
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1 if cell.stages > 1 else samples,
        "gradient_accumulation_steps": samples if cell.stages > 1 else 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.95], "eps": EPS, "weight_decay": 0.1}},
        **cell.config,
    }
    if cell.precision != "fp32":
        config[cell.precision] = {"enabled": True}
    model: Any = make_model(cell.model)
    if cell.stages > 1:
        model = PipelineModule.from_transformers(model, num_stages=cell.stages, loss_fn=_loss)
    engine = deepspeed.initialize(model=model, config=config)[0]
    if how == "LOAD":
        engine.load_checkpoint(folder)
    return _EngineStep(cell, engine), steps if how == "LOAD" else 0


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
