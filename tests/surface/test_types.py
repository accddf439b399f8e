"""Type checkers, IDEs and programs that freeze applications see the modules and names that a program sees."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import deepspeed
from deepspeed.lazy import stated_imports
from tests.project.graph import ROOT, modules, tree_of

PROGRAM = """
import torch
import deepspeed
import deepspeed.comm as dist
from deepspeed.module_inject.layers import LinearAllreduce
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.runtime.utils import PartitionedTensor
from deepspeed.utils.groups import _get_data_parallel_group
from deepspeed.zero import GatheredParameters

model = torch.nn.Linear(2, 2)
engine, optimizer, _, _ = deepspeed.initialize(model=model, config={"train_batch_size": 1})
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
with GatheredParameters(list(model.parameters()), modifier_rank=0):
    deepspeed.utils.logging.logger.info("full")
dist.barrier()
"""
WRONG = """
from deepspeed.zero import NoSuchName
from deepspeed.runtime.utils import NoSuchName
from deepspeed.utils.groups import no_such_name
deepspeed.no_such_name
deepspeed.initialize(modle=None)
deepspeed.initialize(model="text")
deepspeed.zero.GatheredParameters()
"""


def _at_the_top(body: list[ast.stmt]):
    """Yields the statements that a type checker executes at the top of a module."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            is_hidden = isinstance(node.test, ast.UnaryOp)
            yield from _at_the_top(node.orelse if is_hidden else node.body)
        else:
            yield node


def test_no_module_answers_every_name_to_type_checkers():
    assert (ROOT / "deepspeed" / "py.typed").exists()
    assert not list((ROOT / "deepspeed").rglob("*.pyi"))
    found = []
    for module in modules():
        for node in _at_the_top(tree_of(module).body):
            names = [node.name] if isinstance(node, ast.FunctionDef) else []
            names += [ast.unparse(target) for target in getattr(node, "targets", [])]
            found += [module for name in names if "__getattr__" in name]
    assert not found, f"write it in the else of `if TYPE_CHECKING`: {found}"


def test_stated_names_are_there():
    lacking = []
    for module, path in modules().items():
        if "lazy_names(__name__)" not in path.read_text(encoding="utf-8") or module == "deepspeed.lazy":
            continue
        loaded = importlib.import_module(module)
        lacking += [f"{module}.{name}" for name in loaded.__all__ if not hasattr(loaded, name)]
    assert not lacking


def test_statements_that_are_read():
    code = compile(
        "import a.b\nfrom c import d as e, f\nif 0 == a:\n    from g.h import i as i\ndef k():\n    from l import m\n",
        "module",
        "exec",
    )
    assert stated_imports(code) == {"e": ("c", "d"), "f": ("c", "f"), "i": ("g.h", "i")}


def test_every_module_is_a_file():
    listed = {entry.name for entry in pkgutil.walk_packages(deepspeed.__path__, "deepspeed.")}
    assert {"deepspeed.utils.timer", "deepspeed.runtime.zero.stage3", "deepspeed.moe.layer"} <= listed
    for module in ("deepspeed.runtime.zero.stage3", "deepspeed.moe", "deepspeed.utils.groups"):
        assert inspect.getsource(importlib.import_module(module))


@pytest.mark.slow
def test_a_program_is_checked(tmp_path):
    """The same with pyright: ``make release-check``."""
    (tmp_path / "right.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(PROGRAM + WRONG)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache")]

    def check(name: str) -> list[str]:
        done = subprocess.run([*command, str(tmp_path / name)], capture_output=True, text=True, timeout=250, cwd=ROOT)
        return [line for line in done.stdout.splitlines() if "error:" in line]

    assert check("right.py") == []
    first = len(PROGRAM.splitlines()) + 1
    lines = {int(line.split(":")[1]) for line in check("wrong.py")}
    assert lines == set(range(first + 1, first + len(WRONG.splitlines())))
