"""``FlopsProfiler`` and ``get_model_profile``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.profiling.flops_profiler.profile import ForwardProfile, first_parameter
from deepspeed.profiling.flops_profiler.report import readable, readable_time, report

BACKWARD_FACTOR = 2
"""The backward pass computes the gradient of each product's two operands: twice the operations of forward."""


class FlopsProfiler:
    """Counts what a model's forward calls cost between :meth:`start_profile` and :meth:`stop_profile`.

    Args:
        model: The model.
        ds_engine: The engine around it, for the lines of the report about batch sizes and phases; may be None.
        recompute_fwd_factor: Forward passes repeated in backward; 1 with full activation checkpointing.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self._profile: ForwardProfile | None = None

    @property
    def started(self) -> bool:
        """Whether calls are counted now."""
        return self._profile is not None and self._profile.is_running

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begins to count, from zero.

        Args:
            ignore_list: Classes of modules that get no line of their own; what they do counts for their parents.

        Raises:
            RuntimeError: It runs already.
        """
        if self.started:
            raise RuntimeError("the flops profiler is running already; call stop_profile() before start_profile()")
        self._profile = ForwardProfile(self.model, ignore_list or ())
        self._profile.start()

    def stop_profile(self) -> None:
        """Ends counting; the totals stay."""
        if self._profile is not None:
            self._profile.stop()

    def reset_profile(self) -> None:
        """Sets the totals to zero."""
        if self._profile is not None:
            self._profile.root.clear()

    def end_profile(self) -> None:
        """Ends counting and forgets the totals."""
        self.stop_profile()
        self._profile = None

    def _root(self) -> Any:
        if self._profile is None:
            raise RuntimeError("the flops profiler has measured nothing; call start_profile() and run the model first")
        return self._profile.root

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Floating-point operations of the forward calls."""
        return readable(self._root().flops, "FLOPs") if as_string else self._root().flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulates of the forward calls."""
        return readable(self._root().macs, "MACs") if as_string else self._root().macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the forward calls."""
        return readable_time(self._root().seconds) if as_string else self._root().seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the model, all of them on every rank whatever ZeRO shards."""
        return readable(self._root().params) if as_string else self._root().params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Writes the report to ``output_file``, or to standard output.

        Args:
            profile_step: The step, for the heading.
            module_depth: Depth of the table of largest modules; -1 is all.
            top_modules: Modules per depth.
            detailed: Add a line per module.
            output_file: Path of the file; its folder is made.
        """
        text = report(
            self._root(),
            self._facts(),
            step=profile_step,
            depth=module_depth,
            top=top_modules,
            detailed=detailed,
        )
        if output_file is None:
            sys.stdout.write(text)
            return
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _facts(self) -> list[tuple[str, str]]:
        root = self._root()
        forward = root.flops
        backward = forward * (BACKWARD_FACTOR + self.recompute_fwd_factor)
        facts = [
            ("parameters", readable(root.params)),
            ("forward MACs per rank", readable(root.macs, "MACs")),
            ("forward operations per rank", readable(forward, "FLOPs")),
            ("backward operations per rank (estimated)", readable(backward, "FLOPs")),
            ("forward time", readable_time(root.seconds)),
        ]
        engine = self.ds_engine
        if engine is None:
            return facts
        global_batch, micro_batch, accumulation = engine.get_batch_info()
        facts = [
            ("ranks", str(engine.world_size)),
            ("batch", f"{global_batch} = {micro_batch} x {accumulation} x {engine.dp_world_size}"),
            *facts,
        ]
        times = {phase: watch.elapsed(reset=False) / 1e3 for phase, watch in engine.timers.get_timers().items()}
        whole = sum(times.values())
        facts += [(f"{phase} time of the step", readable_time(seconds)) for phase, seconds in times.items()]
        if whole > 0:
            operations = (forward + backward) * accumulation
            facts.append(("operations per second and rank", readable(operations / whole, "FLOPS")))
            facts.append(("samples per second", f"{global_batch / whole:.2f}"))
        return facts


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Profiles one call of a model.

    Args:
        model: The model; it is put into evaluation mode.
        input_shape: Shape of one floating input made here, batch included; or give ``args`` and ``kwargs``.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        print_profile: Write the report.
        detailed: With a line per module.
        module_depth: Depth of the table of largest modules; -1 is all.
        top_modules: Modules per depth.
        warm_up: Calls before the one that counts.
        as_string: Return text with units.
        output_file: File for the report; None: standard output.
        ignore_modules: Classes of modules without a line of their own.
        mode: ``forward`` or ``generate``.

    Returns:
        Operations, multiply-accumulates, parameters.

    Raises:
        ValueError: ``mode`` is something else, or there is no input.
    """
    calls = {"forward": model, "generate": getattr(model, "generate", None)}
    call = calls.get(mode)
    if call is None:
        raise ValueError(f"get_model_profile(mode={mode!r}): expected 'forward', or 'generate' of a model that has it")
    if input_shape is None and not args and not kwargs:
        raise ValueError("get_model_profile: there is no input; give input_shape, args or kwargs")
    inputs = list(args)
    if input_shape is not None:
        example = first_parameter(model)
        inputs.insert(0, (torch.empty(0) if example is None else example).new_ones(tuple(input_shape)))
    model.eval()
    named = dict(kwargs or {})
    profiler = FlopsProfiler(model)
    with torch.no_grad():
        for _ in range(warm_up):
            call(*inputs, **named)
        profiler.start_profile(ignore_modules)
        try:
            call(*inputs, **named)
        finally:
            profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
