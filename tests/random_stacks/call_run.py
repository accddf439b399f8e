"""Runs a list of calls on an engine and logs what each returns, as numbers that do not depend on the sharding."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.random_stacks.engines import build, mean_over_ranks
from tests.random_stacks.models import ROWS, WordModel, batch_of
from tests.random_stacks.stack import Config, Stack

Log = list[tuple[str, Any]]
_PARTIAL: tuple[dict[str, bool], ...] = (
    {"load_optimizer_states": False},
    {"load_lr_scheduler_states": False},
    {"load_module_only": True},
    {"load_optimizer_states": False, "load_lr_scheduler_states": False},
)
# Names of a state; empty where parameters have different ones. All others have "exp_avg".
_STATES = {"SGD": "momentum_buffer", "client SGD": "momentum_buffer", "Adagrad": "sum", "Muon": ""}
_FILLED = 20  # micro-batches; more than any accumulation that is drawn


def run_calls(stack: Stack, config: Config, folder: str) -> Log:
    """Returns the name and the result of each call, and at the end all parameters. Every rank must call it.

    A call that raises ends the list; its entry is ``("raised", (name, type, message))``.
    """
    import deepspeed

    run = CallRun(stack, config, folder)
    for name, share, salt in stack.options["calls"]:
        try:
            result = ACTIONS.get(name, CallRun.train)(run, share, salt)
        except Exception as error:  # the other stage must raise the same
            run.log.append(("raised", (name, type(error).__name__, str(error)[:300])))
            break
        run.log.append((name, result))
    with deepspeed.zero.GatheredParameters(list(run.engine.module.parameters())):
        run.log.append(("end", run.sums_of(run.engine.module.state_dict())))
    run.engine.destroy()
    return run.log


class CallRun:
    """An engine and the calls of it. Each call takes a number between 0 and 1, and one that chooses parameters."""

    def __init__(self, stack: Stack, config: Config, folder: str) -> None:
        self.stack, self.config = stack, config
        self.engine = self.built(5)
        self.stage = config["zero_optimization"]["stage"]
        self.state = _STATES.get(stack.optimizer, "exp_avg")
        self.folder, self.log = folder, Log()
        self.batches = self.tags = 0

    # -- parts of calls ----------------------------------------------------------------------------------------------

    def built(self, seed: int) -> Any:
        """Returns an engine of a model with the initial values of ``seed``."""
        torch.manual_seed(seed)
        return build(self.stack, WordModel(counts=True, **self.stack.options["model"]), self.config)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the next micro-batch of this rank."""
        self.batches += 1
        return batch_of(self.batches, dist.get_rank())

    def update(self, loss: torch.Tensor, **given: Any) -> float:
        """Does the backward of a loss and a step; returns its mean over the ranks."""
        self.engine.backward(loss, **given)
        self.engine.step()
        return mean_over_ranks(loss)

    def train(self, _share: float = 0.0, _salt: int = 0) -> float:
        return self.update(self.engine(*self.batch()))

    def fill(self) -> None:
        """Trains until the next step would begin a new accumulation."""
        for _ in range(_FILLED):
            if self.engine.micro_steps % self.engine.gradient_accumulation_steps() == 0:
                return
            self.log.append(("fill", self.train()))

    def chosen(self, salt: int) -> tuple[str, Any]:
        """Returns the name and the parameter that a number stands for."""
        named = list(self.engine.module.named_parameters())
        return named[salt % len(named)]

    @staticmethod
    def sum_of(tensor: torch.Tensor | None) -> float | None:
        """Returns a number that changes with the values of a tensor."""
        if tensor is None:
            return None
        values = tensor.detach().double()
        return float(values.sum()) + 3 * float(values.abs().sum())

    def sums_of(self, tensors: dict[str, torch.Tensor]) -> dict[str, float | None]:
        """Returns a number for each tensor."""
        return {name: self.sum_of(tensor) for name, tensor in tensors.items()}

    # -- batches and backwards ---------------------------------------------------------------------------------------

    def skip_block(self, _share: float, salt: int) -> float:
        return self.update(self.engine(*self.batch(), skip=salt % 3))

    def no_sync(self, _share: float, _salt: int) -> list[float]:
        self.fill()
        with self.engine.no_sync():
            loss = self.engine(*self.batch())
            self.engine.backward(loss)
        return [mean_over_ranks(loss), self.train()]

    def two_forwards(self, _share: float, _salt: int) -> float:
        return self.update(self.engine(*self.batch()) + 0.5 * self.engine(*self.batch()))

    def unscaled(self, _share: float, _salt: int) -> float:
        return self.update(self.engine(*self.batch()), scale_wrt_gas=False)

    def scaled_loss(self, share: float, _salt: int) -> float:
        return self.update(self.engine(*self.batch()) * share)

    def cleared(self, _share: float, _salt: int) -> float:
        loss = self.engine(*self.batch())
        self.engine.backward(loss)
        self.engine.zero_grad()
        self.engine.step()
        return mean_over_ranks(loss)

    def set_boundary(self, _share: float, _salt: int) -> float:
        self.fill()
        self.engine.set_gradient_accumulation_boundary(False)
        self.update(self.engine(*self.batch()))
        self.engine.set_gradient_accumulation_boundary(True)
        loss = self.train()
        self.engine.set_gradient_accumulation_boundary(None)
        return loss

    def set_batch_size(self, _share: float, salt: int) -> int:
        self.fill()
        self.engine.set_train_batch_size(ROWS * dist.get_world_size() * (1 + salt % 3))
        return int(self.engine.gradient_accumulation_steps())

    # -- forwards alone ----------------------------------------------------------------------------------------------

    def evaluate(self, _share: float, salt: int) -> float:
        self.engine.eval()
        with torch.set_grad_enabled(salt % 2 == 0):
            loss = self.engine(*self.batch())
        self.engine.train()
        return mean_over_ranks(loss)

    def forward_without_grad(self, _share: float, _salt: int) -> float:
        with torch.no_grad():
            return mean_over_ranks(self.engine(*self.batch()))

    # -- hyper-parameters and counters -------------------------------------------------------------------------------

    def change_rates(self, share: float, _salt: int) -> list[float]:
        for group in self.engine.optimizer.param_groups:
            group["lr"] *= 0.5 + share
        return [group["lr"] for group in self.engine.optimizer.param_groups]

    def change_decay(self, share: float, _salt: int) -> None:
        self.fill()
        for group in self.engine.optimizer.param_groups:
            group["weight_decay"] = share * 0.1

    def step_schedule(self, _share: float, _salt: int) -> list[float]:
        if self.engine.lr_scheduler is not None:
            self.engine.lr_scheduler.step()
        return list(self.engine.get_lr())

    def counters(self, _share: float, _salt: int) -> tuple[int, ...]:
        engine = self.engine
        return engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples

    def norm(self, _share: float, _salt: int) -> float:
        self.fill()
        self.train()
        self.fill()
        return float(self.engine.get_global_grad_norm() or 0)

    # -- values of parameters, gradients and states ------------------------------------------------------------------

    def gathered(self, _share: float, _salt: int) -> dict[str, float | None]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.engine.module.parameters())):
            return self.sums_of(self.engine.module.state_dict())

    def change_gathered(self, _share: float, salt: int) -> str:
        import deepspeed

        self.fill()
        name, parameter = self.chosen(salt)
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            if dist.get_rank() == 0 or self.stage < 3:
                parameter.data.mul_(0.5)
        return name

    def get(self, _share: float, salt: int) -> list[Any]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        name, parameter = self.chosen(salt)
        state = None
        if parameter.requires_grad and self.state:
            state = safe_get_full_optimizer_state(parameter, self.state)
        return [name, self.sum_of(safe_get_full_fp32_param(parameter)), self.sum_of(state)]

    def get_gradient(self, _share: float, salt: int) -> list[Any]:
        from deepspeed.utils import safe_get_full_grad

        name, parameter = self.chosen(salt)
        return [name, self.sum_of(safe_get_full_grad(parameter))]

    def set_master(self, _share: float, salt: int) -> str:
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        self.fill()
        name, parameter = self.chosen(salt)
        value = safe_get_full_fp32_param(parameter)
        if value is not None:
            safe_set_full_fp32_param(parameter, value * 0.9 + 0.01)
        return name

    def set_gradient(self, _share: float, salt: int) -> list[Any]:
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        name, parameter = self.chosen(salt)
        loss = self.engine(*self.batch())
        self.engine.backward(loss)
        value = safe_get_full_grad(parameter) if self.engine.is_gradient_accumulation_boundary() else None
        if value is not None:
            safe_set_full_grad(parameter, value * 0.5)
        self.engine.step()
        return [name, self.sum_of(value)]

    def set_state(self, _share: float, salt: int) -> list[Any]:
        from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

        self.fill()
        name, parameter = self.chosen(salt)
        value = safe_get_full_optimizer_state(parameter, self.state) if parameter.requires_grad else None
        if value is not None:
            safe_set_full_optimizer_state(parameter, value * 0.5, self.state)
        return [name, self.sum_of(value)]

    def freeze_and_back(self, _share: float, salt: int) -> str:
        self.fill()
        name, parameter = self.chosen(salt)
        parameter.requires_grad_(not parameter.requires_grad)
        parameter.requires_grad_(not parameter.requires_grad)
        self.train()
        self.fill()
        return name

    def move_states(self, _share: float, _salt: int) -> None:
        if hasattr(self.engine, "offload_states"):
            self.engine.offload_states()
            self.engine.reload_states()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_and_load(self, _share: float, salt: int) -> list[Any]:
        """Saves, trains on, and loads all or a part of what was saved."""
        self.fill()
        self.tags += 1
        tag = f"t{self.tags}"
        self.engine.save_checkpoint(self.folder, tag=tag, client_state={"salt": salt})
        results: list[Any] = [self.train() for _ in range(salt % 4)]
        self.fill()
        partial = _PARTIAL[salt // 8 % 4] if salt // 4 % 2 else {}
        path, client = self.engine.load_checkpoint(self.folder, tag=tag, **partial)
        return [*results, path is not None, client.get("salt"), self.engine.global_steps]

    def save(self, _share: float, _salt: int) -> None:
        self.tags += 1
        self.engine.save_checkpoint(self.folder, tag=f"t{self.tags}")

    def save_and_return(self, _share: float, _salt: int) -> None:
        """Loads what it has just saved, where that is everything: between two updates."""
        if self.engine.micro_steps % self.engine.gradient_accumulation_steps() == 0:
            self.save(0.0, 0)
            self.engine.load_checkpoint(self.folder, tag=f"t{self.tags}")

    def read_as_modifier(self, _share: float, salt: int) -> None:
        """Gathers parameters to change them, and changes nothing."""
        import deepspeed

        with deepspeed.zero.GatheredParameters([self.chosen(salt)[1], self.chosen(salt + 1)[1]], modifier_rank=0):
            pass

    def stream_weights(self, _share: float, salt: int) -> None:
        for _ in self.engine.export_weights(bucket_bytes=1 + salt):
            pass

    def copy_optimizer_state(self, _share: float, _salt: int) -> None:
        copy.deepcopy(self.engine.optimizer.state_dict())

    def build_again(self, _share: float, _salt: int) -> list[float]:
        """Saves, and goes on with another engine that loads it."""
        self.fill()
        self.tags += 1
        self.engine.save_checkpoint(self.folder, tag=f"t{self.tags}")
        self.engine.destroy()
        self.engine = self.built(99)
        self.engine.load_checkpoint(self.folder, tag=f"t{self.tags}")
        return list(self.engine.get_lr())

    def export_masters(self, _share: float, _salt: int) -> dict[str, float | None]:
        """Reads the fp32 weights out of a checkpoint."""
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        self.fill()
        self.tags += 1
        self.engine.save_checkpoint(self.folder, tag=f"t{self.tags}")
        dist.barrier()
        return self.sums_of(get_fp32_state_dict_from_zero_checkpoint(self.folder, f"t{self.tags}"))

    def load_optimizer_state(self, _share: float, _salt: int) -> float:
        self.fill()
        state = copy.deepcopy(self.engine.optimizer.state_dict())
        loss = self.train()
        self.fill()
        self.engine.optimizer.load_state_dict(state)
        return loss

    def save_weights(self, _share: float, _salt: int) -> None:
        self.tags += 1
        self.engine.save_16bit_model(f"{self.folder}/weights{self.tags}", "weights.pt")
        dist.barrier()

    def export(self, _share: float, _salt: int) -> dict[str, float | None]:
        if self.stage == 3:
            state = self.engine._zero3_consolidated_16bit_state_dict()
        else:
            state = self.engine.module.state_dict()
        return self.sums_of(state) if dist.get_rank() == 0 else {}


ACTIONS: dict[str, Callable[[CallRun, float, int], Any]] = {
    action.__name__: action
    for action in (
        CallRun.skip_block, CallRun.no_sync, CallRun.two_forwards, CallRun.unscaled, CallRun.scaled_loss,
        CallRun.cleared, CallRun.set_boundary, CallRun.set_batch_size, CallRun.evaluate, CallRun.forward_without_grad,
        CallRun.change_rates, CallRun.change_decay, CallRun.step_schedule, CallRun.counters, CallRun.norm,
        CallRun.gathered, CallRun.change_gathered, CallRun.get, CallRun.set_master, CallRun.set_gradient,
        CallRun.set_state, CallRun.freeze_and_back, CallRun.move_states, CallRun.save_and_load,
        CallRun.load_optimizer_state, CallRun.save_weights, CallRun.export, CallRun.build_again,
        CallRun.export_masters,
    )
}  # fmt: skip
READS = (
    "evaluate", "counters", "gathered", "get", "get_gradient", "move_states", "save", "save_and_return",
    "copy_optimizer_state", "save_weights", "export", "read_as_modifier", "stream_weights",
)  # fmt: skip
"""Calls that leave the training as it is, after any micro-batch."""
