"""Profiles a model's forward calls and writes the report: :class:`FlopsProfiler`, :func:`get_model_profile`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.profiling.flops_profiler.profile import ForwardProfile, ModuleProfile

BACKWARD_FACTOR = 2
"""Operations of backward per operation of forward: each product has the gradients of two operands."""


class FlopsProfiler:
    """Counts operations and times of forward calls between :meth:`start_profile` and :meth:`stop_profile`.

    Args:
        ds_engine: The model's engine, for the lines of the report about batch sizes and phases; may be None.
        recompute_fwd_factor: Forward passes that backward repeats; 1 with full activation checkpointing.

    Attributes:
        flops: Floating-point operations in the newest report of :meth:`print_model_profile`; 0 before one.
        macs: Multiply-accumulates in that report.
        params: Elements of parameters in that report.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.flops = self.macs = self.params = 0
        self._profile: ForwardProfile | None = None

    @property
    def started(self) -> bool:
        """Whether calls are counted now."""
        return self._profile is not None and self._profile.is_running

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Starts counting; classes in ``ignore_list`` count for parents. Raises RuntimeError: it is running."""
        if self.started:
            raise RuntimeError("the flops profiler is running already; call stop_profile() before start_profile()")
        self._profile = ForwardProfile(self.model, ignore_list or ())
        self._profile.start()

    def stop_profile(self) -> None:
        """Stops counting and keeps the totals."""
        if self._profile is not None:
            self._profile.stop()

    def reset_profile(self) -> None:
        """Sets the totals to zero."""
        if self._profile is not None:
            self._profile.root.clear()

    def end_profile(self) -> None:
        """Stops counting and discards the totals."""
        self.stop_profile()
        self._profile = None

    def _root(self) -> Any:
        if self._profile is None:
            raise RuntimeError("the flops profiler has measured nothing; call start_profile() and run the model first")
        return self._profile.root

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Returns the floating-point operations of the forward calls."""
        return readable(self._root().flops, "FLOPs") if as_string else self._root().flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Returns the multiply-accumulates of the forward calls."""
        return readable(self._root().macs, "MACs") if as_string else self._root().macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Returns the time of the forward calls in seconds, or as text with a unit."""
        return readable_time(self._root().seconds) if as_string else self._root().seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Returns the number of elements of all parameters, those included that ZeRO shards over ranks."""
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
            profile_step: Number of the step, for the heading.
            module_depth: Depth of the table of largest modules; -1: all depths.
            output_file: Path of the file; its folder is created.
        """
        root = self._root()
        self.flops, self.macs, self.params = root.flops, root.macs, root.params
        text = report(
            root,
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
        total = sum(times.values())
        facts += [(f"{phase} time of the step", readable_time(seconds)) for phase, seconds in times.items()]
        if total > 0:
            operations = (forward + backward) * accumulation
            facts.append(("operations per second and rank", readable(operations / total, "FLOPS")))
            facts.append(("samples per second", f"{global_batch / total:.2f}"))
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
    """Profiles one call of a model; returns operations, multiply-accumulates, parameters.

    Args:
        model: The model; it is set to evaluation mode and stays in it.
        input_shape: Shape of one input of ones in the model's dtype, batch included; or give ``args`` and ``kwargs``.
        module_depth: Depth of the table of largest modules; -1: all depths.
        as_string: Return text with units.
        output_file: File for the report; None: standard output.
        ignore_modules: Classes of modules without a line of their own.
        mode: ``forward`` or ``generate``.

    Raises:
        ValueError: ``mode`` is unknown or not a method of the model, or there is no input.
    """
    call = {"forward": model, "generate": getattr(model, "generate", None)}.get(mode)
    if call is None:
        raise ValueError(f"get_model_profile(mode={mode!r}): expected 'forward', or 'generate' of a model that has it")
    if input_shape is None and not args and not kwargs:
        raise ValueError("get_model_profile: expected an input, found none; give input_shape, args or kwargs")
    inputs = list(args)
    if input_shape is not None:
        example = next(model.parameters(), torch.empty(0))  # has the model's device and dtype
        inputs.insert(0, example.new_ones(tuple(input_shape)))
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


_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))


def readable(number: float, unit: str = "", digits: int = 2) -> str:
    """Returns a number as text with a prefix and the unit: ``1234567`` as ``1.23 M``."""
    for size, prefix in _PREFIXES:
        if abs(number) >= size:
            return f"{number / size:.{digits}f} {prefix}{unit}".rstrip()
    return f"{number:.{digits}f} {unit}".rstrip() if number != int(number) else f"{int(number)} {unit}".rstrip()


def readable_time(seconds: float) -> str:
    """Returns a duration as text, in s, ms or us."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"


_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Returns a number and a prefix (T, G, M, K, m, u or "", None: by size): ``1234567`` as ``"1.23 M"``.

    Raises:
        ValueError: There is no such prefix.
    """
    if units is None:
        fitting = [prefix for prefix, size in _MAGNITUDES.items() if abs(num) >= size]
        units = "" if num == 0 else [*fitting, "u"][0]
    if units not in _MAGNITUDES:
        raise ValueError(f"units={units!r}: expected one of {', '.join(map(repr, _MAGNITUDES))}")
    return f"{round(num / _MAGNITUDES[units], precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Returns floating-point operations as :func:`number_to_string` does: ``"1.2 GFLOPS"``."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Returns multiply-accumulates as :func:`number_to_string` does: ``"1.2 GMACs"``."""
    return f"{number_to_string(macs, units, precision)}MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Returns a number of parameters as :func:`number_to_string` does, billions as ``"1.2 B"``."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Returns seconds as :func:`number_to_string` does: ``"1.2 ms"``."""
    return f"{number_to_string(duration, units, precision)}s"


def report(
    root: ModuleProfile,
    facts: Sequence[tuple[str, str]],
    *,
    step: int,
    depth: int = -1,
    top: int = 1,
    detailed: bool = True,
) -> str:
    """Returns the text of the report. ``facts``: lines of the summary: label and value."""
    lines = [
        f"flops profile of step {step}",
        "Operations of the forward pass, from the shapes that it ran with; one multiply-accumulate (MAC) is two",
        "operations. Times include a wait for the device at each module, so they add up to more than a pass takes",
        "without the profiler.",
        "",
    ]
    width = max((len(what) for what, _ in facts), default=0)
    lines += [f"  {what:<{width}}  {value}" for what, value in facts]
    lines += ["", f"largest modules per depth (the first {top}):"]
    lines += _largest(root, depth, top)
    if detailed:
        lines += ["", "module tree: parameters, share; MACs, share; time, share; operations per second", *_tree(root)]
    return "\n".join(lines) + "\n"


def _largest(root: ModuleProfile, depth: int, top: int) -> Iterator[str]:
    deepest = max(node.depth for node in root.walk())
    for level in range(deepest + 1) if depth == -1 else [min(depth, deepest)]:
        by_kind: dict[str, list[float]] = {}
        for node in root.walk():
            if node.depth == level:
                sums = by_kind.setdefault(node.kind, [0, 0, 0.0])
                sums[0], sums[1], sums[2] = sums[0] + node.params, sums[1] + node.macs, sums[2] + node.seconds

        def best(column: int, kinds: dict[str, list[float]] = by_kind) -> list[tuple[str, float]]:
            ordered = sorted(kinds.items(), key=lambda item: -item[1][column])[:top]
            return [(kind, sums[column]) for kind, sums in ordered]

        yield f"  depth {level}:"
        yield "    parameters  " + ", ".join(f"{kind} {readable(value)}" for kind, value in best(0))
        yield "    MACs        " + ", ".join(f"{kind} {readable(value, 'MACs')}" for kind, value in best(1))
        yield "    time        " + ", ".join(f"{kind} {readable_time(value)}" for kind, value in best(2))


def _tree(root: ModuleProfile) -> Iterator[str]:
    params, macs, seconds = max(root.params, 1), max(root.macs, 1), max(root.seconds, 1e-12)
    for node in root.walk():
        name = f"({node.name}): {node.kind}" if node.name else node.kind
        rate = readable(node.flops / node.seconds, "FLOPS") if node.seconds > 0 else "not called"
        yield (
            f"{'  ' * (node.depth + 1)}{name}({node.description}): "
            f"{readable(node.params)}, {node.params / params:.1%}; "
            f"{readable(node.macs, 'MACs')}, {node.macs / macs:.1%}; "
            f"{readable_time(node.seconds)}, {node.seconds / seconds:.1%}; {rate}"
        )
