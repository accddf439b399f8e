"""What runs code when it is read stays in few modules: nothing between ranks is unpickled."""

from __future__ import annotations

import ast

from tests.project.graph import modules, nodes_of

REASONS = {
    "deepspeed.checkpoint.bounded_pickle": "follows the opcodes of a file without executing them",
    "deepspeed.checkpoint.restricted": "files; loads_trusting only where the caller vouches for them",
    "deepspeed.checkpoint.upstream.files": "the original package's files; trusted only on request",
    "deepspeed.checkpoint.upstream.universal": "writes files of the original package",
    "deepspeed.comm": "exports the functions of comm.collectives",
    "deepspeed.comm.collectives": "functions of torch's names that a program calls with its own objects",
    "deepspeed.inference.weight_files": "names the exception of torch's restricted loader",
}
"""Modules that name pickle or collectives of objects, with the reason."""
TRUSTING = {"deepspeed.checkpoint.restricted", "deepspeed.checkpoint.upstream.files"}
"""Modules that call torch.load(weights_only=False)."""


def _words(module: str) -> set[str]:
    found = {node.attr for node in nodes_of(module, ast.Attribute)} | {node.id for node in nodes_of(module, ast.Name)}
    for node in nodes_of(module, ast.Import, ast.ImportFrom):
        found |= {getattr(node, "module", None) or "", *(alias.name for alias in node.names)}
    return found


def _is_pickling(word: str) -> bool:
    return word in ("pickle", "pickletools", "cloudpickle", "dill", "marshal", "shelve") or (
        word.endswith(("_object", "_object_list"))
        and word.startswith(("all_gather", "gather", "broadcast", "scatter", "send", "recv"))
    )


def test_objects_are_pickled_in_few_modules_for_a_reason():
    assert {module for module in modules() if any(map(_is_pickling, _words(module)))} == set(REASONS)


def test_torch_files_are_read_without_running_code():
    trusting = set()
    for module in modules():
        for node in nodes_of(module, ast.Call):
            if ast.unparse(node.func) == "torch.load":
                restricted = [ast.unparse(each.value) for each in node.keywords if each.arg == "weights_only"]
                trusting |= {module} if restricted != ["True"] else set()
    assert trusting == TRUSTING
