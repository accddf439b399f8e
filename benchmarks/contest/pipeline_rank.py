"""One rank of one contestant of ``benchmarks/pipeline.py``: builds its pipeline, then does a step at each request.

It runs in the environment of its contestant, so of this repository it imports only ``workloads`` beside it, and
``deepspeed`` where that is this one. Each line of standard input requests a step; the answer is a line of JSON with the
seconds, the processor seconds and the loss. The end of standard input ends it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from workloads import Block

_LATE = 3e-4  # seconds by which a sleep may end too late


class _LayerClock:
    """Takes the time of a layer: sleeps, then polls the clock for an exact end.

    The layer's time includes the overhead of autograd, as that of a real layer does.
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
    """Takes the time of the gradient of the inputs, in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, clock: _LayerClock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds, ctx.anchor = clock, seconds, anchor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        ctx.clock.take(ctx.seconds)
        return gradient, None if ctx.anchor is None else torch.zeros_like(ctx.anchor), None, None


class _ForWeights(torch.autograd.Function):
    """Takes the time of the gradient of the weights, in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, clock: _LayerClock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds, ctx.shape = clock, seconds, weight.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        ctx.clock.take(ctx.seconds)
        return None, gradient.new_zeros(ctx.shape), None, None


class _Both(torch.autograd.Function):
    """Takes the time of forward, and starts the clock in backward. Its gradient goes to both inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: Tensor, clock: _LayerClock, seconds: float) -> Tensor:
        ctx.clock = clock
        clock.take(seconds)
        return x.data  # not a view: torch.distributed.pipelining detaches the outputs of a stage in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.clock.begin()
        return gradient, gradient, None, None


class SleepingLayer(nn.Module):
    """Takes a fixed time for forward and backward, and computes nothing."""

    def __init__(self, forward: float, backward: float, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.seconds = (forward, backward - weight, weight)

    def forward(self, x: Tensor) -> Tensor:
        clock = _LayerClock()
        clock.begin()
        forward, backward_input, backward_weight = self.seconds
        # The inputs of the model need no gradient, but its first layer must take as long as the others.
        main = _ForInputs.apply(x, None if x.requires_grad else self.weight, clock, backward_input)
        side = _ForWeights.apply(x.detach(), self.weight, clock, backward_weight)
        return _Both.apply(main, side, clock, forward)


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places.weight[: tokens.shape[1]]


class Head(nn.Module):
    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(self.norm(x))


def _mean(outputs: Tensor, labels: Tensor) -> Tensor:
    # One element only: a mean over large activations would take time.
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
    """A pipeline of this project or of the published package, by the same calls."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed("gloo")
        layers, loss, inputs, labels = workload(setup)
        arguments: dict[str, Any] = {}
        if setup["kind"] == "ours":
            arguments["schedule"] = setup["schedule"]
        cut = "type:Block" if setup["workload"] == "gpt" else "uniform"
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
        return float(self.engine.train_batch(itertools.repeat(self._item)))


class Torch:
    """Trains the model with ``torch.distributed.pipelining``, to be compared."""

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
        stage_of = list(range(stages))  # by chunk
        if name not in ("gpipe", "1f1b", "zb-h1"):
            stage_of += reversed(range(stages)) if name in ("zbv", "dualpipev") else range(stages)
        # The first chunk also has the embedding, the last one the head.
        ends = 1 if setup["workload"] == "gpt" else 0
        inner = (len(layers) - 2 * ends) // len(stage_of)
        bounds = [0, *(ends + inner * chunk for chunk in range(1, len(stage_of))), len(layers)]
        own = [chunk for chunk, stage in enumerate(stage_of) if stage == self._rank]
        modules = [nn.Sequential(*layers[bounds[chunk] : bounds[chunk + 1]]) for chunk in own]
        parts = [
            pipelining.PipelineStage(module, chunk, len(stage_of), torch.device("cpu"))
            for module, chunk in zip(modules, own, strict=True)
        ]
        made = getattr(pipelining, self.NAMES[name])
        takes_one = name in ("gpipe", "1f1b")
        self._schedule = made(parts[0] if takes_one else parts, setup["micro_batches"], loss_fn=loss)
        self._is_first, self._is_last = 0 in own, len(stage_of) - 1 in own
        self._inputs = torch.cat([inputs] * setup["micro_batches"])
        self._labels = torch.cat([labels] * setup["micro_batches"])
        self._optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=1e-3)

    def step(self) -> float:
        self._optimizer.zero_grad()
        losses: list[Tensor] = []
        inputs = (self._inputs,) if self._is_first else ()
        target = {"target": self._labels, "losses": losses} if self._is_last else {}
        self._schedule.step(*inputs, **target)
        self._optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).mean().item() if losses else 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("setup", type=json.loads)
    setup = parser.parse_args().setup
    os.environ.update({key: str(value) for key, value in setup["environment"].items()})
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr  # the output of libraries must not mix with the answers
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
    os._exit(0)  # an ordinary exit could wait for a rank that has ended already


if __name__ == "__main__":
    main()
