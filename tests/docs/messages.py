"""The texts in the package's code, with ``…`` where a value is filled in."""

import ast
import re
from functools import cache

from tests.project import graph

LEAST = 20  # characters that a quotation must give literally


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[srd]|%\.\d+f", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = _text(node.left), _text(node.right)
        return None if sides == (None, None) else "".join("…" if side is None else side for side in sides)
    return None


@cache
def corpus() -> tuple[str, ...]:
    """Every text of the package, white space made even."""
    found = []
    for module in graph.modules():
        for node in ast.walk(graph.tree_of(module)):
            text = _text(node)
            if text and len(text) >= LEAST:
                found.append(_even(text))
    return tuple(found)


def _even(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def occurs(message: str, texts: tuple[str, ...]) -> bool:
    """Whether a text of the code holds the message; ``…`` in the message stands for anything in the text."""
    parts = [_even(part) for part in message.split("…")]
    parts = [part for part in parts if part]
    if sum(map(len, parts)) < LEAST:
        return False
    pattern = re.compile(".*".join(map(re.escape, parts)))
    return any(pattern.search(text) for text in texts)
