"""Base of this package's elementwise optimizers: any parameters by ``step``, flat runs by ``flat_update``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import ParamsT

from deepspeed.ops.flat import FlatByRule, UpdateRule, current_step, init_state, run_in_chunks
from deepspeed.uncompiled import torchs


class KeepsStateDtypes(torch.optim.Optimizer):
    """A torch optimizer whose state may have other dtypes than the parameters."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads like torch, but keeps the dtype of saved fp32 state, which torch casts to the parameter's."""
        torchs(super().load_state_dict)(state_dict)
        # Torch casts floating states to the dtype of the parameter: state tensors get their saved dtype back.
        saved_ids = [saved for group in state_dict["param_groups"] for saved in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            for name, value in state_dict["state"].get(saved_id, {}).items():
                if not isinstance(value, Tensor) or name == "step":
                    continue
                if self.state[param][name].dtype != value.dtype:
                    self.state[param][name] = value.detach().to(device=param.device, copy=True)


class ElementwiseOptimizer(FlatByRule, KeepsStateDtypes):
    """A torch optimizer whose update is a :class:`~deepspeed.ops.flat.UpdateRule`.

    A subclass is a signature with defaults, a rule, and the names of its attributes that are pickled.

    Invariant: per-element state has the shape of its parameter; ``step`` is one number per parameter.

    Args:
        defaults: Hyperparameters of groups that have none of their own; sequences become tuples.
        amsgrad: Not available.

    Raises:
        ValueError: ``amsgrad`` is requested, or a number is out of range.
    """

    _pickled_attributes: tuple[str, ...] = ("fp32_optimizer_states",)

    #: Keep state in fp32 also where the parameter has 16 bit.
    fp32_optimizer_states: bool = False

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, amsgrad: bool = False, **attributes: Any) -> None:
        checked = {name: defaults[name] for name in ("lr", "betas", "eps", "weight_decay") if name in defaults}
        check_hyperparameters(self, **checked, amsgrad=amsgrad)
        vars(self).update(attributes)
        if "betas" in defaults:
            defaults["betas"] = tuple(defaults["betas"])
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickles and copies: torch's, and the attributes that determine the rule."""
        own = {name: value for name, value in vars(self).items() if name in self._pickled_attributes}
        return {**super().__getstate__(), **own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; other optimizers' keys have no effect. Raises ValueError: it requests AMSGrad."""
        if isinstance(param_group, dict) and param_group.get("amsgrad"):
            raise ValueError(f"{type(self).__name__} has no AMSGrad variant; remove amsgrad=True or use torch.optim's")
        torchs(super().add_param_group)(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns what ``closure`` returned, or None."""
        loss = evaluate(closure)
        for group in self.param_groups:
            self._update_group(group)
        return loss

    def _update_group(self, group: dict[str, Any]) -> None:
        update_group(self, self.rule, group, fp32_states=self.fp32_optimizer_states)


class ClearsGradients(ElementwiseOptimizer):
    """An elementwise optimizer whose constructor chooses what ``zero_grad`` does."""

    _pickled_attributes = (*ElementwiseOptimizer._pickled_attributes, "set_grad_none")
    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients; None: sets them to None if the constructor got ``set_grad_none``."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Returns what the closure of a ``step`` returns, called with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def update_group(
    optimizer: torch.optim.Optimizer, rule: UpdateRule, group: dict[str, Any], *, fp32_states: bool = False
) -> None:
    """Applies one step of ``rule`` to the group's parameters with a gradient, of any shape, layout and dtype."""
    names = list(rule.initial_state(group))
    together: dict[tuple[Any, ...], list[tuple[Tensor, Tensor, list[Tensor]]]] = defaultdict(list)
    steps: dict[tuple[Any, ...], float | Tensor] = {}
    for param in group["params"]:
        if param.grad is None:
            continue
        check_supported(optimizer, param)
        state = optimizer.state[param]
        dtype = torch.promote_types(param.dtype, torch.float32) if fp32_states else param.dtype
        init_state(rule, group, param, state, dtype)
        step = current_step(rule, state, advance=True)
        states = [state[name] for name in names]
        if rule.runs_lists_at_once(param.device) and _share_layout(param, param.grad, *states):
            key = (param.device, param.dtype, step if not isinstance(step, Tensor) else id(step))
            together[key].append((param, param.grad, states))
            steps[key] = step
        else:
            _update_alone(rule.kernel(group, step, param.device), param, param.grad, states)
    for key, members in together.items():
        params, grads, states_of_each = (list(column) for column in zip(*members, strict=True))
        kernel = rule.kernel(group, steps[key], params[0].device)
        kernel(params, grads, [list(column) for column in zip(*states_of_each, strict=True)])


def check_supported(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    """Raises for gradients and parameters, of any shape, that no optimizer of this package can use.

    Raises:
        RuntimeError: The gradient is sparse, or the parameter is not floating-point.
    """
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        raise RuntimeError(
            f"{type(optimizer).__name__} does not take sparse gradients (parameter of shape {tuple(param.shape)}); "
            "use torch.optim.SparseAdam or sparse=False in the embedding"
        )
    if not param.is_floating_point():
        raise RuntimeError(
            f"{type(optimizer).__name__} updates floating-point parameters, but one is {param.dtype}; "
            "leave it out of the param groups"
        )


def _share_layout(*tensors: Tensor) -> bool:
    """Returns whether tensors have one dtype and one memory order without gaps; kernels may then walk them linearly."""
    first = tensors[0]
    return _is_dense(first) and all(t.dtype == first.dtype and t.stride() == first.stride() for t in tensors)


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements fill their range of memory exactly, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _update_alone(kernel: Any, param: Tensor, grad: Tensor, states: list[Tensor]) -> None:
    """Updates one parameter of any layout and dtypes by contiguous 1-D views, or copies if there is no such view."""
    targets = [param, *states]
    flats = [target.detach().contiguous().view(-1) for target in targets]
    run_in_chunks(kernel, flats[0], grad.detach().contiguous().view(-1), flats[1:])
    for target, flat in zip(targets, flats, strict=True):
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))


def check_hyperparameters(
    optimizer: object,
    *,
    lr: float | Tensor,
    betas: Sequence[float] = (),
    eps: float = 0.0,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> None:
    """Raises for hyperparameters out of range; a tensor ``lr`` must have one element.

    Raises:
        ValueError: A value is out of range, or ``amsgrad`` is requested.
    """
    name = type(optimizer).__name__
    if amsgrad:
        raise ValueError(f"{name} has no AMSGrad variant; remove amsgrad=True or use torch.optim's class")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            f"{name}: lr: expected a number or a tensor of one element, found shape {tuple(lr.shape)}; pass a number"
        )
    for argument, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
        if not value >= 0:
            raise ValueError(f"{name}: {argument}: expected 0 or more, found {value}; correct it")
    for position, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"{name}: betas[{position}]: expected 0 <= beta < 1, found {beta}; correct it")


@contextmanager
def step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Calls the step pre-hooks on entry and the step post-hooks on exit, as ``step()`` does.

    In the hooks the parameters of the groups are flat runs without ``.grad``, because the flat update reads gradients
    from separate buffers.
    """
    _call_each(torch_optimizer._global_optimizer_pre_hooks, optimizer)
    _call_each(optimizer._optimizer_step_pre_hooks, optimizer)
    yield
    _call_each(optimizer._optimizer_step_post_hooks, optimizer)
    _call_each(torch_optimizer._global_optimizer_post_hooks, optimizer)


def _call_each(hooks: dict, optimizer: torch.optim.Optimizer) -> None:  # type: ignore[type-arg]
    for hook in list(hooks.values()):
        hook(optimizer, (), {})
