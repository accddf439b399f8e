"""The text of a flops profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepspeed.profiling.flops_profiler.profile import ModuleProfile

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))


def readable(number: float, unit: str = "", digits: int = 2) -> str:
    """``1234567`` as ``1.23 M``, with the unit behind it."""
    for size, prefix in _PREFIXES:
        if abs(number) >= size:
            return f"{number / size:.{digits}f} {prefix}{unit}".rstrip()
    return f"{number:.{digits}f} {unit}".rstrip() if number != int(number) else f"{int(number)} {unit}".rstrip()


def readable_time(seconds: float) -> str:
    """A duration in the unit that suits it."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def report(
    root: ModuleProfile,
    facts: Sequence[tuple[str, str]],
    *,
    step: int,
    depth: int = -1,
    top: int = 1,
    detailed: bool = True,
) -> str:
    """The whole report.

    Args:
        root: The model.
        facts: Lines of the summary: what and how much.
        step: The step that was profiled.
        depth: Depth of the second part; -1 is the deepest.
        top: Modules named per depth.
        detailed: Add the module tree.
    """
    lines = [
        f"flops profile of step {step}",
        "Operations of the forward pass, from the shapes that it ran with; one multiply-accumulate (MAC) is two",
        "operations. Times include waiting for the device at each module, so they add up to more than an undisturbed",
        "pass takes.",
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
    """Per depth, the classes with most parameters, MACs and time."""
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
