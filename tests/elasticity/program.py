"""A training program whose ranks come and go, and the same training in plain torch."""

from __future__ import annotations

import copy
import json
import os
import pkgutil
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from deepspeed.elasticity.steps import ElasticStep

SAMPLES, FEATURES, OUTPUTS = 97, 16, 4
BATCH, MICRO = 24, 2
RATE, DECAY, CLIP = 1e-2, 0.01, 1.0


CUT = {
    "autotp_size": 2,
    "partition_config": {
        "layer_specs": [
            {"patterns": ["frozen.weight"]},
            {"patterns": ["last.weight"], "partition_type": "row"},
        ]
    },
}
"""The section tensor_parallel for the awkward model: of 33 features the ranks have 17 and 16."""


class AwkwardModel(torch.nn.Module):
    """Tied weights, a frozen layer, an unused parameter, and a buffer that counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.first, self.again = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(FEATURES, 33).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))
        self.last = nn.Linear(33, OUTPUTS)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns outputs, [N, OUTPUTS], of inputs, [N, FEATURES]."""
        if self.training:
            self.forwards += 1
        return self.last(self.frozen(self.again(self.first(x).tanh()).tanh()).tanh())


class ExpertModel(torch.nn.Module):
    """Four experts, which begin with different values, on two ranks each half of them, or all on one."""

    def __init__(self, ranks: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        nn = torch.nn
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, OUTPUTS)
        expert = nn.Linear(FEATURES, FEATURES)
        self.experts = MoE(FEATURES, expert, num_experts=4, ep_size=ranks, k=1, drop_tokens=False, use_rts=False)
        count = 4 // ranks
        first = int(os.environ.get("RANK", "0")) % ranks * count  # a process that joins gets others' values later
        with torch.no_grad():
            for number, own in enumerate(self.experts.deepspeed_moe.experts.deepspeed_experts):
                own.weight.add_(0.1 * (first + number))  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns outputs, [N, OUTPUTS], of inputs, [N, FEATURES]."""
        return self.last(self.experts(self.first(x).tanh())[0].tanh())


def make_model(kind: str = "plain", expert_ranks: int = 2) -> torch.nn.Module:
    """A model, equal on all ranks; ``kind``: ``"plain"``, ``"awkward"`` or ``"experts"``, spread over so many ranks."""
    torch.manual_seed(0)
    if kind == "experts":
        return ExpertModel(expert_ranks)
    if kind == "awkward":
        return AwkwardModel()
    nn = torch.nn
    return nn.Sequential(nn.Linear(FEATURES, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, OUTPUTS))


def make_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two param groups with rates and decays of their own: matrices, and the rest."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.dim() > 1]},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "lr": 3 * RATE, "weight_decay": 0.0},
    ]


def make_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(FEATURES, generator=generator), torch.randn(OUTPUTS, generator=generator)) for _ in range(SAMPLES)
    ]


def make_config(stage: int, **more: Any) -> dict[str, Any]:
    threshold = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    zero = {"stage": stage, **threshold, **more.pop("zero", {})}
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO,
        "elasticity": {"continue": True, **more.pop("elasticity", {})},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}},
        "zero_optimization": zero,
        **more,
    }


def order(position: int, seed: int = 0) -> int:
    """The sample at a position of the run, as documented for ``ElasticSteps``."""
    epoch, place = divmod(position, SAMPLES)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return int(torch.randperm(SAMPLES, generator=generator)[place])


def plain_losses(steps: int, kind: str = "plain") -> list[float]:
    """The losses of plain torch on whole batches."""
    model, data = make_model(kind, expert_ranks=1), make_data()
    optimizer = torch.optim.AdamW(make_groups(model) if kind == "awkward" else model.parameters(), RATE)
    for group in optimizer.param_groups:
        group["weight_decay"] = DECAY if group["lr"] == RATE else 0.0
    losses = []
    for step in range(steps):
        chosen = [data[order(position)] for position in range(step * BATCH, (step + 1) * BATCH)]
        x, y = (torch.stack(values) for values in zip(*chosen, strict=True))
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(arguments: dict[str, Any], name: str, folder: Path) -> None:
    """Trains, and writes a line for each step to ``folder/name.jsonl``.

    Args:
        arguments: ``config``, ``total`` (steps), ``die`` (by name: step and place where the process kills itself;
            after ``error``, where it raises; after ``stop``, where it stops),
            ``model`` (its kind), ``pause`` (seconds in each step), ``save`` (steps between checkpoints) and
            ``checkpoints`` (``names_folder``: whether ``ElasticSteps`` gets them), ``load`` (whether to load the last
            one first), ``pauses`` (steps at which one ``ElasticSteps`` ends and the next begins); ``kills``: how often
            a rank kills itself at a random moment, with ``seed``.
            ``aimed``: by name, the one of :data:`MOMENTS` at whose first coming the process kills itself.
            ``children``: whether ranks fork a child that outlives them by five seconds.
        name: Of the process.
        folder: For results.
    """
    import deepspeed
    from deepspeed.elasticity import ElasticSteps
    from deepspeed.elasticity.continuation import continuation_of

    config = copy.deepcopy(arguments["config"])
    kind = arguments.get("model", "plain")
    model = make_model(kind)
    groups = make_groups(model) if kind == "awkward" else None
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    if name in arguments.get("aimed", {}):
        _die_at(*MOMENTS[arguments["aimed"][name]])
    dtype = next(engine.module.parameters()).dtype
    checkpoints = arguments.get("checkpoints")
    if arguments.get("children") and os.fork() == 0:
        while os.getppid() != 1:
            time.sleep(0.1)
        time.sleep(5.0)
        os._exit(0)
    deaths = [tuple(death) for death in arguments.get("die", {}).get(name, ())]
    if arguments.get("load"):
        engine.load_checkpoint(checkpoints)
    results = (folder / f"{name}.jsonl").open("a", buffering=1)

    def die(step: int, place: str) -> None:
        if (step, f"error {place}") in deaths:
            raise RuntimeError(f"an error on {name}")
        if (step, f"stop {place}") in deaths:
            os.kill(os.getpid(), signal.SIGSTOP)
        if (step, place) in deaths:
            _wait_for_those_who_die_too(arguments["die"], (step, place), name, folder)
            os.kill(os.getpid(), signal.SIGKILL)

    def all_steps() -> Iterator[ElasticStep]:
        for total in (*arguments.get("pauses", ()), arguments["total"]):
            named = checkpoints if arguments.get("names_folder", True) else None
            yield from ElasticSteps(engine, make_data(), total, checkpoints=named)

    for step in all_steps():
        ranks = int(os.environ["WORLD_SIZE"])
        with step:
            if arguments.get("kills"):
                _die_by_chance(arguments, step.number, folder, lambda: continuation_of(engine).joining > 0)
            die(step.number, "start")
            for number, (x, y) in enumerate(step):
                loss = torch.nn.functional.mse_loss(engine(x.to(dtype)).float(), y)
                if number == 0:
                    die(step.number, "forward")
                engine.backward(loss)
                if number == 0:
                    die(step.number, "backward")
                engine.step()
            die(step.number, "update")
            if arguments.get("save") and (step.number + 1) % arguments["save"] == 0:
                engine.save_checkpoint(checkpoints)
            time.sleep(arguments.get("pause", 0.0))
        line = {"step": step.number, "done": step.is_done, "loss": step.loss, "ranks": ranks}
        results.write(json.dumps({**line, "rates": engine.get_lr(), "scale": engine.optimizer.loss_scale}) + "\n")
    engine.wait_for_checkpoint()
    recoveries = [
        {"ranks": r.ranks, "lost": len(r.lost), "repeated": r.repeated, "seconds": r.total, "words": r.lost}
        for r in continuation_of(engine).run.recoveries
    ]
    counted = {name: int(buffer) for name, buffer in engine.module.named_buffers()}
    ended = {"end": True, "steps": engine.global_steps, "recoveries": recoveries, "buffers": counted}
    results.write(json.dumps(ended) + "\n")


MOMENTS = {
    "regroup": ("deepspeed.comm.members.regroup:Regroup", "run"),
    "form": ("deepspeed.comm.members.form:JobManager", "start_job"),
    "build": ("deepspeed.elasticity.continuation", "build_again"),
    "fill": ("deepspeed.elasticity.continuation", "restore"),
    "load": ("deepspeed.engine.checkpointing", "load"),
    "end": ("deepspeed.elasticity.copies:CopyStore", "trim"),
    "write": ("deepspeed.checkpoint.save", "_write_files"),
    "commit": ("deepspeed.checkpoint.save", "_commit"),
}
"""Moments of a recovery and of a save, by the function that is called then. A recovery ends when old copies go."""


def _die_at(owner: str, function: str) -> None:
    """Lets this process kill itself where a function is called."""
    setattr(pkgutil.resolve_name(owner), function, lambda *_args, **_named: os.kill(os.getpid(), signal.SIGKILL))


def _wait_for_those_who_die_too(
    deaths: dict[str, list[tuple[int, str]]], moment: tuple[int, str], name: str, folder: Path
) -> None:
    """Returns when all who die at the start of this step have come to it.

    Otherwise a slow one may recover from the death of a fast one before its own.
    """
    step, place = moment
    if place != "start":  # elsewhere a rank may wait for one that is dead
        return
    (folder / f"{name}-start-{step}").touch()
    others = [other for other, all_of_one in deaths.items() if moment in map(tuple, all_of_one)]
    while not all((folder / f"{other}-start-{step}").exists() for other in others):
        time.sleep(0.005)


def _die_by_chance(arguments: dict[str, Any], step: int, folder: Path, is_joined: Callable[[], bool]) -> None:
    """Kills one of three ranks or more a random while after the beginning of a step, perhaps in a recovery.

    Not before the first checkpoint: a rank and its buddy may be killed at once. Two ranks wait for one that joins.
    """
    if step < arguments["save"] or len(list(folder.glob("kill-*"))) >= arguments["kills"]:
        return
    chance = random.Random(arguments["seed"] * 100_003 + step)
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    victim, delay = chance.randrange(ranks), chance.uniform(0.0, 0.08)
    deadline = time.monotonic() + 60.0
    while ranks < 3 and rank == 0 and not is_joined() and time.monotonic() < deadline:
        time.sleep(0.01)
    if ranks < 3 or rank != victim:
        return
    try:
        (folder / f"kill-{step}").touch(exist_ok=False)
    except FileExistsError:  # the step comes again
        return
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
