"""The same program in one process of plain torch: every data rank's batches go through one whole model."""

import copy
import math
from typing import Any

import torch
from torch import nn

from tests.random_programs import models
from tests.random_programs.experts import PlainMoE, margin_of
from tests.random_programs.program import Action, Phase, Program
from tests.random_programs.training import (
    DTYPES,
    build_optimizer,
    build_schedule,
    changed,
    chosen,
    loss_of,
    param_groups,
    prepare,
)
from tests.random_programs.values import batch_of

Values = dict[tuple[Any, ...], Any]
_MARGIN = 2e-6


class NothingTrained(Exception):
    """Actions of the program have frozen every parameter, so it has no backward."""


class Oracle:
    """Runs a program. ``values`` has what the ranks must find, by key.

    Masters are fp32. Where the precision is lower, forward and backward run on a rounded copy.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: Values = {}
        self.masters = models.whole(program.model)
        self.named = dict(self.masters.named_parameters())
        prepare(program, self.named, {}, 0)
        self.start = {name: p.detach().clone() for name, p in self.named.items()}
        self.model = copy.deepcopy(self.masters).to(DTYPES[program.precision])
        self.computing = dict(self.model.named_parameters())
        self.optimizer = build_optimizer(program.optimizer, param_groups(program.optimizer, self.named))
        self.schedule = build_schedule(program.optimizer, self.optimizer)
        self.margin = math.inf
        self._watch_routers()
        self.gradients: dict[str, torch.Tensor] = {}
        self.frozen: dict[str, bool] = {}

    def _watch_routers(self) -> None:
        """Notes how clearly the routers of a Transformers model choose."""

        def seen(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            self.margin = min(self.margin, margin_of(outputs[0].softmax(dim=-1), self.program.model.given["k"]))

        for module in self.model.modules():
            if type(module).__name__.endswith("Router"):
                module.register_forward_hook(seen)

    @property
    def is_decided(self) -> bool:
        """Returns whether every token's experts are clearly its best ones, so that rounding cannot choose others."""
        layers = [module for module in self.model.modules() if isinstance(module, PlainMoE)]
        return min([self.margin, *(layer.margin for layer in layers)]) > _MARGIN

    def run(self) -> Values:
        """All phases.

        Returns:
            Losses, norms, learning rates, outputs of evaluations, what actions read, and at the end of each phase
            every parameter and state.
        """
        for number, phase in enumerate(self.program.phases):
            for step in range(phase.steps):
                self._step(number, phase, step)
            self._note_state(number)
        return self.values

    def _step(self, number: int, phase: Phase, step: int) -> None:
        for action in phase.at(step):
            self._before(number, phase, step, action)
        if phase.has("compare", step):
            self._note_state(number, step)
        self.gradients = {}
        self.model.train()
        for micro in range(phase.accumulation):
            for data in range(phase.layout.data):
                self._backward(number, phase, step, micro, data)
        for action in phase.at(step):
            self._before_update(number, step, action)
        self._update(number, phase, step)

    def _backward(self, number: int, phase: Phase, step: int, micro: int, data: int) -> None:
        loss = self._loss(number, phase, step, micro, data)
        if phase.has("two forwards", step):
            loss = (loss + self._loss(number, phase, step, micro, data, extra=1)) / 2
        self.values[number, step, "loss", micro, data] = loss.item()
        scale = 256.0 if self.program.precision == "fp16" else 1.0
        (loss * scale / phase.accumulation / phase.layout.data).backward()
        for name, parameter in self.computing.items():
            if parameter.grad is not None:
                gradient = parameter.grad.float() / scale
                self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient
                parameter.grad = None

    def _loss(self, number: int, phase: Phase, step: int, micro: int, data: int, extra: int = 0) -> torch.Tensor:
        batch = batch_of(self.program.model, number, step, micro, data, extra)
        logits, balance = models.run(self.program.model, self.model, batch)
        return loss_of(logits, balance if phase.layout.sequence == 1 else None, batch["labels"])

    def _update(self, number: int, phase: Phase, step: int) -> None:
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in self.gradients.values()))
        self.values[number, step, "norm"] = norm
        clip = self.program.clip
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for name, master in self.named.items():
            master.grad = self.gradients[name] * factor if name in self.gradients else None
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.publish()
        self.values[number, step, "rates"] = [group["lr"] for group in self.optimizer.param_groups]

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the masters into the model that computes."""
        for name, parameter in self.computing.items():
            parameter.copy_(self.named[name])

    @torch.no_grad()
    def _before(self, number: int, phase: Phase, step: int, action: Action) -> None:
        names = [name for name, parameter in self.named.items() if parameter.requires_grad]
        if action.name == "evaluate":
            self._evaluate(number, phase, step)
        elif action.name in ("set master", "gathered"):
            for name in chosen(names, action):
                self.named[name].copy_(changed(self.named[name]))
            self.publish()
        elif action.name == "set state":
            for name in chosen(names, action):
                for key, value in self.optimizer.state.get(self.named[name], {}).items():
                    if key != "step" and value.shape == self.named[name].shape:
                        value.copy_(changed(value))
        elif action.name in ("freeze", "unfreeze"):
            is_frozen = action.name == "freeze"
            for name in chosen(list(self.named), action):
                self.frozen[name] = is_frozen
                self.named[name].requires_grad_(not is_frozen)
                self.computing[name].requires_grad_(not is_frozen)
            if not any(parameter.requires_grad for parameter in self.named.values()):
                raise NothingTrained

    def _evaluate(self, number: int, phase: Phase, step: int) -> None:
        """Evaluates every rank's batch. Sequence ranks evaluate whole batches of their own."""
        self.model.eval()
        layout = phase.layout
        for data in range(layout.data * layout.sequence):
            batch = batch_of(self.program.model, number, step, 0, data, extra=2)
            logits, balance = models.run(self.program.model, self.model, batch)
            if batch["mask"] is not None:
                logits = logits.masked_fill(batch["mask"].unsqueeze(-1) == 0, math.nan)  # rows without meaning
            self.values[number, step, "logits", data] = logits
            balance = balance if layout.sequence == 1 else None
            self.values[number, step, "evaluated loss", data] = loss_of(
                torch.nan_to_num(logits), balance, batch["labels"]
            ).item()
        self.model.train()

    @torch.no_grad()
    def _before_update(self, number: int, step: int, action: Action) -> None:
        names = [name for name, parameter in self.named.items() if parameter.requires_grad]
        if action.name == "get gradient":
            for name in names:
                self.values[number, step, "gradient", name] = (
                    self.gradients[name].clone() if name in self.gradients else None
                )
        elif action.name == "set gradient":
            for name in chosen(names, action):
                if name in self.gradients:
                    self.gradients[name] = changed(self.gradients[name])

    def _note_state(self, number: int, step: int = -1) -> None:
        for name, parameter in self.named.items():
            self.values[number, step, "master", name] = parameter.detach().clone()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value.shape == parameter.shape and key != "step":
                    self.values[number, step, key, name] = value.clone()


def state_keys(program: Program) -> list[str]:
    """Returns the names of the per-element states that the optimizer keeps."""
    parameter = nn.Parameter(torch.ones(2))
    choice = program.optimizer
    optimizer = build_optimizer(choice, [{"params": [parameter]}])
    parameter.grad = torch.ones(2)
    optimizer.step()
    return sorted(key for key, value in optimizer.state[parameter].items() if value.shape == parameter.shape)
