"""Features are named in their own packages and in the list of all, and state what they exclude as conflicts."""

from __future__ import annotations

import ast
import re

from deepspeed.engine.features import FEATURES
from deepspeed.zero.update.driver import UpdateDriver
from tests.project.graph import modules, nodes_of

ENGINE = ("deepspeed.engine.initialize", "deepspeed.engine.train_step", "deepspeed.engine.resuming")
WORDS = re.compile(r"island|elastic|curriculum|random.?ltd|progressive|snip|preempt|autotun", re.IGNORECASE)
FORMAT = {"random_ltd", "quantization_pace"}  # keys of the model-states file


def test_no_feature_is_named_where_all_are_used() -> None:
    packages = {name.removesuffix(".feature") for name in FEATURES}
    named = []
    for module in [*ENGINE, *(name for name in modules() if name.startswith("deepspeed.checkpoint"))]:
        for node in nodes_of(module, ast.ImportFrom):
            imported = node.module or ""
            named += [f"{module}: {one}" for one in packages if f"{imported}.".startswith(f"{one}.")]
        for node in nodes_of(module, ast.Name, ast.Attribute, ast.arg, ast.Constant):
            text = str(
                getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None) or node.value
            )
            if WORDS.search(text) and text not in FORMAT and not text.startswith("deepspeed.checkpoint"):
                named.append(f"{module}:{node.lineno}: {text[:60]}")
    assert not named, "state it in the feature, through a hook of engine_feature:\n" + "\n".join(named)


def test_drivers_state_what_they_exclude_as_a_feature() -> None:
    assert not hasattr(UpdateDriver, "refuse")
    drivers = [name for name in modules() if name.startswith(("deepspeed.zero.onebit", "deepspeed.zero.update"))]
    asking = [name for name in drivers for node in nodes_of(name, ast.Attribute) if node.attr == "islands"]
    assert not asking, "write a Conflict of the optimizer's feature instead"
