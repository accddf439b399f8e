"""Runs a phase of a program on its ranks; each rank returns its values under the keys of the oracle."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from tests.random_programs import models
from tests.random_programs.engines import build
from tests.random_programs.names import my_rank
from tests.random_programs.oracle import state_keys
from tests.random_programs.program import Action, Program
from tests.random_programs.training import changed, chosen, loss_of
from tests.random_programs.values import batch_of, part_of

Values = dict[tuple[Any, ...], Any]


def run_phase(program: Program, number: int, folder: str) -> Values:
    """Runs on every rank. A key ``("logits", data, start, stop)`` has the tokens from ``start`` to ``stop``."""
    return PhaseRun(program, number, folder).run()


class PhaseRun:
    """One phase on this rank."""

    def __init__(self, program: Program, number: int, folder: str) -> None:
        self.program, self.number, self.folder = program, number, folder
        self.phase = program.phases[number]
        self.layout = self.phase.layout
        self.place = self.layout.place(my_rank())
        self.values: Values = {}
        whole = models.whole(program.model)
        self.begins_frozen = {name: not p.requires_grad for name, p in whole.named_parameters()}
        self.every = list(self.begins_frozen)
        self.frozen = frozen_before(program, number)
        self.engine, self.names = build(program, self.phase, number, dict(self.frozen), f"{folder}/states")
        self.here = {self.names.whole(name): p for name, p in self.engine.module.named_parameters()}

    def run(self) -> Values:
        engine = self.engine
        if self.number:
            path, _ = engine.load_checkpoint(f"{self.folder}/phase{self.number - 1}")
            assert path is not None, "no checkpoint was found"
        for step in range(self.phase.steps):
            for action in self.phase.at(step):
                self._before(step, action)
            if self.phase.has("compare", step):
                self._note_state(step)
            if self.layout.pipe:
                self._pipeline_step(step)
            else:
                self._step(step)
            self.values[self.number, step, "norm"] = engine.get_global_grad_norm()
            if not self.layout.pipe:  # a stage may lack some groups
                self.values[self.number, step, "rates"] = [group["lr"] for group in engine.optimizer.param_groups]
        self._note_state(-1)
        engine.save_checkpoint(f"{self.folder}/phase{self.number}")
        engine.destroy()
        return self.values

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        engine, phase = self.engine, self.phase
        by_no_sync = phase.has("no_sync", -1)
        for micro in range(phase.accumulation):
            is_last = micro == phase.accumulation - 1
            loss = self._loss(self._batch(step, micro))
            if phase.has("two forwards", step):
                loss = (loss + self._loss(self._batch(step, micro, extra=1))) / 2
            if phase.has("lost forward", step):
                self._loss(self._batch(step, micro, extra=3))
            self.values[self.number, step, "loss", micro, self.place.data] = loss.item()
            with engine.no_sync() if by_no_sync and not is_last else contextlib.nullcontext():
                engine.backward(loss / phase.accumulation if by_no_sync else loss)
            del loss
            if is_last:
                for action in phase.at(step):
                    self._before_update(step, action)
            if is_last or not by_no_sync:
                engine.step()

    def _pipeline_step(self, step: int) -> None:
        items = [self._item(self._batch(step, micro)) for micro in range(self.phase.accumulation)]
        self.values[self.number, step, "mean loss"] = self.engine.train_batch(iter(items)).item()

    def _batch(self, step: int, micro: int, extra: int = 0) -> dict[str, Any]:
        whole = batch_of(self.program.model, self.number, step, micro, self.place.data, extra)
        return part_of(whole, self.place.sequence, self.layout.sequence)

    def _item(self, batch: dict[str, Any]) -> Any:
        if not self.program.model.is_transformers:
            return (batch["ids"], batch["positions"]), batch["labels"]
        inputs = {"input_ids": batch["ids"], "position_ids": batch["positions"]}
        if batch["mask"] is not None:
            inputs["attention_mask"] = batch["mask"]
        return inputs, {"shift_labels": batch["labels"]}

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        logits, balance = models.run(self.program.model, self.engine, batch)
        return self._loss_of(logits, balance, batch["labels"])

    def _loss_of(self, logits: torch.Tensor, balance: Any, labels: torch.Tensor) -> torch.Tensor:
        if self.layout.sequence == 1:
            return loss_of(logits, balance, labels)
        from deepspeed.sequence import mean_loss

        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return mean_loss(each, labels)

    # -- actions -----------------------------------------------------------------------------------------------------

    def _trained(self) -> list[str]:
        return [name for name in self.every if not self.frozen.get(name, self.begins_frozen[name])]

    def _before(self, step: int, action: Action) -> None:
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        engine = self.engine
        mine = [name for name in chosen(self._trained(), action) if name in self.here]
        if action.name == "evaluate":
            self._evaluate(step)
        elif action.name == "set master":
            for name in mine:
                safe_set_full_fp32_param(self.here[name], changed(safe_get_full_fp32_param(self.here[name])))
        elif action.name == "gathered":
            self._change_gathered(mine)
        elif action.name == "set state":
            self._change_states(mine)
        elif action.name in ("freeze", "unfreeze"):
            for name in chosen(self.every, action):
                self.frozen[name] = action.name == "freeze"
                if name in self.here:
                    self.here[name].requires_grad_(action.name == "unfreeze")
        elif action.name == "return":
            self._leave_and_return(step)
        elif action.name == "away":
            engine.offload_states()
            engine.reload_states()
        elif action.name == "modes":
            engine.eval()
            engine.train()

    def _change_gathered(self, mine: list[str]) -> None:
        import deepspeed

        for name in mine:
            with deepspeed.zero.GatheredParameters([self.here[name]], modifier_rank=0), torch.no_grad():
                self.here[name].copy_(changed(self.here[name]))

    def _change_states(self, mine: list[str]) -> None:
        from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

        for name in mine:
            for key in state_keys(self.program):
                value = safe_get_full_optimizer_state(self.here[name], key)
                if value is not None:
                    safe_set_full_optimizer_state(self.here[name], changed(value), key)

    def _leave_and_return(self, step: int) -> None:
        """Saves, trains on something else, and loads what was saved."""
        folder = f"{self.folder}/inside{self.number}-{step}"
        self.engine.save_checkpoint(folder)
        if self.layout.pipe:
            items = [self._item(self._batch(step, micro, extra=4)) for micro in range(self.phase.accumulation)]
            self.engine.train_batch(iter(items))
        else:
            for micro in range(self.engine.gradient_accumulation_steps()):
                self.engine.backward(self._loss(self._batch(step, micro, extra=4)))
                self.engine.step()
        self.engine.load_checkpoint(folder)

    def _evaluate(self, step: int) -> None:
        if self.layout.pipe:
            self._evaluate_pipeline(step)
            return
        engine, layout, place = self.engine, self.layout, self.place
        model = self.program.model
        is_cut = layout.sequence > 1 and not model.is_transformers
        data = place.data if is_cut else place.data * layout.sequence + place.sequence
        batch = batch_of(model, self.number, step, 0, data, extra=2)
        tokens = batch["ids"].shape[1]
        start, stop = 0, tokens
        if is_cut:
            start, stop = (tokens * n // layout.sequence for n in (place.sequence, place.sequence + 1))
            batch = part_of(batch, place.sequence, layout.sequence)
        engine.eval()
        with torch.no_grad():
            logits, _ = models.run(model, engine, batch)
        engine.train()
        self.values[self.number, step, "logits", data, start, stop] = logits

    def _evaluate_pipeline(self, step: int) -> None:
        batch = batch_of(self.program.model, self.number, step, 0, self.place.data, extra=2)
        part = part_of(batch, self.place.sequence, self.layout.sequence)
        loss = self.engine.eval_batch(iter([self._item(part)]), num_micro_batches=1)
        self.values[self.number, step, "evaluated mean loss"] = loss.item()

    def _before_update(self, step: int, action: Action) -> None:
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        if action.name == "get gradient":
            for name in self._trained():
                if name in self.here and "experts" not in name:
                    self.values[self.number, step, "gradient", name] = safe_get_full_grad(self.here[name])
        elif action.name == "set gradient":
            for name in chosen(self._trained(), action):
                value = safe_get_full_grad(self.here[name])
                if value is not None:
                    safe_set_full_grad(self.here[name], changed(value))

    # -- state -------------------------------------------------------------------------------------------------------

    def _note_state(self, step: int) -> None:
        for kind in ("fp32", *state_keys(self.program)):
            for name, value in self.engine.iter_full(kind):
                key = "master" if kind == "fp32" else kind
                self.values[(self.number, step, key, *self._cut(self.names.whole(name)))] = value.clone()

    def _cut(self, name: str) -> tuple[Any, ...]:
        """Returns the name and, for stacked experts, the part that this rank holds."""
        if self.layout.experts > 1 and self.program.model.kind == "mixtral" and ".experts." in name:
            return name, self.names.expert_place, self.layout.experts
        return (name,)


def frozen_before(program: Program, number: int) -> dict[str, bool]:
    """Returns which parameters the phases before ``number`` froze or unfroze, by name."""
    every = [name for name, _ in models.whole(program.model).named_parameters()]
    frozen: dict[str, bool] = {}
    for phase in program.phases[:number]:
        for action in _in_order(phase.actions):
            if action.name in ("freeze", "unfreeze"):
                frozen |= dict.fromkeys(chosen(every, action), action.name == "freeze")
    return frozen


def _in_order(actions: tuple[Action, ...]) -> Iterator[Action]:
    return iter(sorted(actions, key=lambda action: action.step))
