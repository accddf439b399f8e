"""One rank of one contestant of ``benchmarks/pipeline.py``: builds its pipeline, then does a step at each request.

It runs in the environment of its contestant, so it imports nothing of this repository but what is called ``deepspeed``.
A line on standard input requests a step; the answer is a line of JSON with the seconds, the processor seconds and the
loss. An empty input ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_LATE = 3e-4  # seconds by which a sleep may end too late


class _LayerClock:
    """Lasts as long as one layer: sleeps, then polls the clock for an exact end.

    What autograd does around the sleeps is part of a layer's time, as it is of any layer's.
    """

    def __init__(self) -> None:
        self._until = 0.0

    def begin(self) -> None:
        self._until = time.perf_counter()

    def take(self, seconds: float) -> None:
        self._until += seconds
        while (left := self._until - time.perf_counter()) > 0:
            if left > _LATE:
                time.sleep(left - _LATE)


class _ForInputs(torch.autograd.Function):
    """Lasts in backward as long as the gradient of the inputs takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, clock: _LayerClock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds, ctx.anchor = clock, seconds, anchor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        ctx.clock.take(ctx.seconds)
        return gradient, None if ctx.anchor is None else torch.zeros_like(ctx.anchor), None, None


class _ForWeights(torch.autograd.Function):
    """Lasts in backward as long as the gradient of the weights takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, clock: _LayerClock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds, ctx.shape = clock, seconds, weight.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        ctx.clock.take(ctx.seconds)
        return None, gradient.new_zeros(ctx.shape), None, None


class _Both(torch.autograd.Function):
    """Passes one value on, and its gradient to both inputs. Lasts as long as forward; starts the clock of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: Tensor, clock: _LayerClock, seconds: float) -> Tensor:
        ctx.clock = clock
        clock.take(seconds)
        return x.data  # not a view: torch's split backwards detach what a stage gives, in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.clock.begin()
        return gradient, gradient, None, None


class SleepingLayer(nn.Module):
    """Computes nothing and takes the given time, whatever else the machine does."""

    def __init__(self, forward: float, backward: float, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.seconds = (forward, backward - weight, weight)

    def forward(self, x: Tensor) -> Tensor:
        clock = _LayerClock()
        clock.begin()
        forward, backward_input, backward_weight = self.seconds
        # The inputs of the model need no gradient; its first layer takes as long as the others all the same.
        main = _ForInputs.apply(x, None if x.requires_grad else self.weight, clock, backward_input)
        side = _ForWeights.apply(x.detach(), self.weight, clock, backward_weight)
        return _Both.apply(main, side, clock, forward)


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places.weight[: tokens.shape[1]]


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.mlp(self.second(x))


class Head(nn.Module):
    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(self.norm(x))


def _mean(outputs: Tensor, labels: Tensor) -> Tensor:
    # A value of one element: a mean over large activations would be work of its own.
    return outputs.flatten()[0] + 0 * labels.flatten()[0]


def _next_token(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def workload(setup: dict[str, Any]) -> tuple[list[nn.Module], Any, Tensor, Tensor]:
    """Returns layers, loss, and the inputs and labels of one micro-batch."""
    torch.manual_seed(0)
    if setup["workload"] == "gpt":
        hidden, length, vocabulary = setup["hidden"], setup["length"], 512
        layers = [
            Embedding(vocabulary, hidden, length),
            *(Block(hidden, 4) for _ in range(8)),
            Head(vocabulary, hidden),
        ]
        tokens = torch.randint(vocabulary, (setup["rows"], length + 1))
        return layers, _next_token, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    count = setup["stages"] * 2
    times = [setup[name] / 1000 * setup["stages"] / count for name in ("forward", "backward", "weight")]
    layers = [SleepingLayer(*times) for _ in range(count)]
    numel = setup["megabytes"] * 2**20 // 4 or 4
    return layers, _mean, torch.zeros(1, numel), torch.zeros(1)


class Deepspeed:
    """This project, or the published package: the same calls."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed("gloo")
        layers, loss, inputs, labels = workload(setup)
        arguments: dict[str, Any] = {}
        if setup["kind"] == "ours":
            arguments["schedule"] = setup["schedule"]
        cut: Any = "uniform"
        if setup["workload"] == "gpt":
            cut = "type:Block"
        model_class: Any = PipelineModule
        if setup["kind"] == "upstream" and setup["schedule"] == "dualpipev":
            from deepspeed.pipe import DualPipeVModule as model_class
        model = model_class(layers, num_stages=setup["stages"], loss_fn=loss, partition_method=cut, **arguments)
        config = {
            "train_micro_batch_size_per_gpu": inputs.shape[0],
            "gradient_accumulation_steps": setup["micro_batches"],
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
        )
        self._item = (inputs, labels)

    def step(self) -> float:
        def items() -> Any:
            while True:
                yield self._item

        return float(self.engine.train_batch(items()))


class Torch:
    """``torch.distributed.pipelining``."""

    NAMES = {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved": "ScheduleInterleaved1F1B",
        "zb-h1": "ScheduleInterleavedZeroBubble",
        "interleaved-zb": "ScheduleInterleavedZeroBubble",
        "zbv": "ScheduleZBVZeroBubble",
        "dualpipev": "ScheduleDualPipeV",
    }

    def __init__(self, setup: dict[str, Any]) -> None:
        from torch.distributed import pipelining

        dist.init_process_group("gloo")
        layers, loss, inputs, labels = workload(setup)
        self._rank, stages = dist.get_rank(), setup["stages"]
        name = setup["schedule"]
        if name in ("gpipe", "1f1b", "zb-h1"):
            place = list(range(stages))
        else:
            turn = reversed(range(stages)) if name in ("zbv", "dualpipev") else range(stages)
            place = [*range(stages), *turn]
        # Embedding and head go with their neighbours.
        ends = 1 if setup["workload"] == "gpt" else 0
        inner = (len(layers) - 2 * ends) // len(place)
        bounds = [0, *(ends + inner * chunk for chunk in range(1, len(place))), len(layers)]
        own = [chunk for chunk, stage in enumerate(place) if stage == self._rank]
        modules = [nn.Sequential(*layers[bounds[chunk] : bounds[chunk + 1]]) for chunk in own]
        parts = [
            pipelining.PipelineStage(module, chunk, len(place), torch.device("cpu"))
            for module, chunk in zip(modules, own, strict=True)
        ]
        made = getattr(pipelining, self.NAMES[name])
        takes_one = name in ("gpipe", "1f1b")
        self._schedule = made(parts[0] if takes_one else parts, setup["micro_batches"], loss_fn=loss)
        self._is_first, self._is_last = 0 in own, len(place) - 1 in own
        self._inputs = torch.cat([inputs] * setup["micro_batches"])
        self._labels = torch.cat([labels] * setup["micro_batches"])
        self._optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=1e-3)

    def step(self) -> float:
        self._optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (self._inputs,) if self._is_first else ()
        target = {"target": self._labels, "losses": losses} if self._is_last else {}
        self._schedule.step(*given, **target)
        self._optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).mean().item() if losses else 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("setup", type=json.loads)
    setup = parser.parse_args().setup
    os.environ.update({key: str(value) for key, value in setup["environment"].items()})
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr  # what others print does not mix with the answers
    contestant = Torch(setup) if setup["kind"] == "torch" else Deepspeed(setup)
    answers.write("ready\n")
    answers.flush()
    for _ in sys.stdin:
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        loss = contestant.step()
        took = {"seconds": time.perf_counter() - start, "busy": time.process_time() - busy, "loss": loss}
        answers.write(json.dumps(took) + "\n")
        answers.flush()
    os._exit(0)  # the others may be gone: nothing is left to agree on


if __name__ == "__main__":
    main()
