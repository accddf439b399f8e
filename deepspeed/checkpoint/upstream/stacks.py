"""Stacked experts of Transformers models in checkpoints of the original package: taken apart there, joined again here.

There a block has three stacks, gate ``w1`` and up ``w3`` ``[E / ep, F, M]``, down ``w2`` ``[E / ep, M, F]``, on each of
the ranks that share them; weights are in a file per expert under ``w1.<number among all>``. The model has
``gate_up_proj`` ``[E, 2 F, M]`` and ``down_proj`` ``[E, M, F]``. The router is the block's ``router.gate`` there and
may have its name in the model as an alias, ``<name>.gate``. A ``shared_expert`` with a gate is in the plural there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed.checkpoint.format import MASTER
from deepspeed.checkpoint.upstream.content import CheckpointValues, RankFragment, Shapes, Values, ValueSource
from deepspeed.errors import CheckpointError

_STACK = re.compile(r"(?P<experts>.*\.experts)\.w(?P<which>[123])(?:\.(?P<number>\d+)|@(?P<place>\d+))")
_LOCAL = re.compile(r".*\.experts\.w[123]")
_SHARED_GATE = re.compile(r"(?P<block>.*)\.shared_experts_gate\.[^.]+")
_OF_ITS_OWN = ("router", "shared_experts")
_USUAL_ROUTER = "gate"
_ROUTER = re.compile(r"(?P<block>.*)\.(?P<name>[^.]+)\.gate\.(?P<leaf>[^.]+)")


def by_place(shapes: Shapes, place: int) -> Shapes:
    """Returns the shapes with the stacks of one place among those that share experts under names of their own."""
    return {f"{name}@{place}" if _LOCAL.fullmatch(name) else name: shape for name, shape in shapes.items()}


def put_together(content: CheckpointValues, module: Mapping[str, Any], where: str) -> None:
    """Gives a model's ``content``, in place, its stacks and routers. Raises CheckpointError: experts are missing."""
    blocks: dict[str, dict[int, dict[int, str]]] = {}
    singles: dict[str, dict[int, dict[int, str]]] = {}
    for name in content.shapes:
        if found := _STACK.fullmatch(name):
            chosen = blocks if found["number"] is None else singles
            number = int(found["number"] or found["place"])
            chosen.setdefault(found["experts"], {}).setdefault(int(found["which"]), {})[number] = name
    made: dict[str, str] = {}
    for experts in dict.fromkeys((*blocks, *singles)):
        for numbered in (blocks.get(experts), singles.get(experts)):
            if numbered is not None:
                _fuse(content, experts, numbered, made, where)
    for name in made:
        del content.shapes[name]
        content.state.scalars.pop(name, None)
    fused = set(made.values())
    content.frozen = (content.frozen - set(made)) | (fused - set(content.values.get(MASTER, ())) if made else set())
    for group in content.state.param_groups:
        group["params"] = list(dict.fromkeys(made.get(name, name) for name in group["params"]))
    if made:
        _rename_routers(content, module)
        # Models that have one shared expert with a gate name it in the singular.
        gates = [m["block"] for name in content.shapes if (m := _SHARED_GATE.fullmatch(name))]
        for block in dict.fromkeys(gates):
            for old in [name for name in content.shapes if name.startswith(f"{block}.shared_experts")]:
                _rename(content, old, old.replace(f"{block}.shared_experts", f"{block}.shared_expert"))


def _fuse(
    content: CheckpointValues, experts: str, numbered: dict[int, dict[int, str]], made: dict[str, str], where: str
) -> None:
    """Builds one block, from its stacks by place or from its experts one by one."""
    for target, parts in (("gate_up_proj", (1, 3)), ("down_proj", (2,))):
        name = f"{experts}.{target}"
        numbers = sorted(numbered.get(parts[0], ()))
        if numbers != list(range(len(numbers))) or any(sorted(numbered.get(part, ())) != numbers for part in parts):
            raise CheckpointError(
                f"{where}: expected all experts of {experts!r}, found those with the numbers {numbers}. Copy the files "
                "of the missing experts into the folder too"
            )
        first = tuple(content.shapes[numbered[parts[0]][0]])
        local, rows, columns = first if len(first) == 3 else (1, *first)
        content.shapes[name] = (local * len(numbers), len(parts) * rows, columns)
        members = [numbered[part][number] for number in numbers for part in parts]
        for held in content.values.values():
            if members[0] in held:
                found = [[_values(held[numbered[part][number]]) for part in parts] for number in numbers]
                held[name] = _joined(found, local, rows * columns)
                for member in members:
                    del held[member]
        if members[0] in content.state.scalars:
            content.state.scalars[name] = content.state.scalars[members[0]]
        made.update(dict.fromkeys(members, name))


def _values(readable: ValueSource) -> Values:
    assert isinstance(readable, Values)
    return readable


def _joined(found: list[list[Values]], local: int, numel: int) -> Values:
    """Stacks of ``local`` experts each, of whose ``numel`` elements of every part one expert's follow each other."""
    tensors: list[Any] = []
    fragments: list[RankFragment] = []
    parts = len(found[0])
    for place, stacks in enumerate(found):
        for part, values in enumerate(stacks):
            for expert in range(local):
                start = ((place * local + expert) * parts + part) * numel
                fragments += _moved(values.fragments, expert * numel, numel, start, len(tensors))
            tensors += values.tensors
    return Values(tensors, fragments)


def _moved(fragments: list[RankFragment], first: int, numel: int, start: int, tensors: int) -> Iterator[RankFragment]:
    """Returns what lies in ``[first, first + numel)``, moved to ``start``, its tensors behind ``tensors`` others."""
    for fragment in fragments:
        begin, end = max(first, fragment.start), min(first + numel, fragment.start + fragment.numel)
        if begin < end:
            offset = fragment.offset + begin - fragment.start
            yield RankFragment(start + begin - first, end - begin, fragment.rank + tensors, offset)


def _rename_routers(content: CheckpointValues, module: Mapping[str, Any]) -> None:
    """Routers under the name in the model, which the model-states file may have as an alias of theirs."""
    for old in [name for name in content.shapes if (m := _ROUTER.fullmatch(name)) and m["name"] == "router"]:
        found = _ROUTER.fullmatch(old)
        assert found is not None
        block, leaf = found["block"], found["leaf"]
        others = [m["name"] for name in module if (m := _ROUTER.fullmatch(name)) and m["block"] == block]
        own = next((name for name in others if name not in _OF_ITS_OWN), _USUAL_ROUTER)
        _rename(content, old, f"{block}.{own}.{leaf}")
        _rename(content, f"{block}.{own}.gate.{leaf}", None)
        for name in [name for name in content.buffers if name.startswith(f"{block}.router.")]:
            content.buffers[name.replace(f"{block}.router.", f"{block}.{own}.")] = content.buffers.pop(name)


def _rename(content: CheckpointValues, old: str, new: str | None) -> None:

    def moved(held: dict[str, Any]) -> None:
        if old in held:
            value = held.pop(old)
            if new is not None:
                held[new] = value

    moved(content.shapes)
    moved(content.state.scalars)
    for held in content.values.values():
        moved(held)
    if old in content.frozen:
        content.frozen.discard(old)
        content.frozen |= {new} if new is not None else set()
    for group in content.state.param_groups:
        group["params"] = [new if name == old else name for name in group["params"] if name != old or new is not None]
