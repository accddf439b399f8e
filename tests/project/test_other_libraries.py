"""Patches and private names of other libraries stand in ``docs/design/other-libraries.md``, with reasons that hold."""

import ast
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.project import graph

PAGE = graph.ROOT / "docs" / "design" / "other-libraries.md"
LIBRARIES = frozenset({"torch", "transformers", "accelerate"})
NO_PATCH = ("torch.utils._python_dispatch.*",)
"""Extension points, as the page lists them."""

BY_TEXT = {
    "deepspeed.models.construction": {
        "PreTrainedModel.initialize_weights": 'for name in ("initialize_weights", ',
        "PreTrainedModel._adjust_bias": '"_adjust_bias"):',
        "transformers.integrations.deepspeed.initialize_weights_zero3": "integration.initialize_weights_zero3 = ",
        "transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref": "setattr(integration, _STAGE_3, None)",
    },
    "deepspeed.models.loading": {
        "PreTrainedModel._load_pretrained_model": "kind._load_pretrained_model = staticmethod(load_files)"
    },
    "deepspeed.models.checkpointing": {"_gradient_checkpointing_func": "setattr(module, _FUNCTION, make(function))"},
    "deepspeed.parallel.sequence.batches": {
        "accelerate.data_loader.skip_first_batches": "setattr(module, _NAME, skip_first_batches)"
    },
    "deepspeed.data.accelerate_loaders": {
        "accelerate.data_loader.DataLoaderShard": "shard.load_state_dict = _wrap_load_state_dict(shard.load_state_dict)"
    },
    "deepspeed.accelerator.cpu": {"mallopt": "library.mallopt"},
}
"""Patches that no assignment to a name of the library shows, and the line that makes each."""

OF_THE_PROCESS = re.compile(r"(?:\w+\.)+register_\w+_hook")
"""Functions of the libraries that register a hook for all objects of a kind."""
MEET_LIBRARIES = ("deepspeed.models.", "deepspeed.data.", "deepspeed.parallel.expert.", "deepspeed.precision.")
"""Where a private name that this package does not define is one of Transformers, Accelerate or torchdata."""
OF_PYTHON = frozenset({"_fields"})
OF_OURS = frozenset({"_follows_samples", "_original"})
OF_FILES = ("_index_to_", "_sample_to_", "_metric_value")
"""Parts of names of files."""


@cache
def _rows() -> dict[str, tuple[str, ...]]:
    """Module -> the names that the page gives for it."""
    rows: dict[str, tuple[str, ...]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`deepspeed"):
            module = cells[0].strip("`").removesuffix(".__init__")
            rows[module] = (*rows.get(module, ()), *re.findall(r"`([^`]+)`", cells[1]))
            assert cells[2], f"{PAGE.name}: {module} has no reason"
    return rows


def _dotted(node: ast.AST) -> list[str]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def _library_names(module: str) -> dict[str, str]:
    """Local name -> dotted name, for what a module imports from the libraries."""
    found: dict[str, str] = {}
    for node in graph.nodes_of(module, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            for one in node.names:
                found[one.asname or one.name.partition(".")[0]] = one.name if one.asname else one.name.partition(".")[0]
        elif node.module:
            found.update({one.asname or one.name: f"{node.module}.{one.name}" for one in node.names})
    return {name: target for name, target in found.items() if target.partition(".")[0] in LIBRARIES}


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yields what a statement assigns to."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        yield node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "Patch"):
        yield from node.args[:1]


@cache
def _found_in(module: str) -> frozenset[str]:
    """Returns the patches and private names in a module, as the page spells them."""
    return frozenset(_search(module))


def _search(module: str) -> Iterator[str]:
    names = _library_names(module)

    def full(node: ast.AST) -> str:
        parts = _dotted(node)
        return ".".join([names[parts[0]], *parts[1:]]) if parts and parts[0] in names else ""

    found = {full(node) for node in graph.nodes_of(module, ast.Attribute)} | set(names.values())
    private = {name for name in found if any(part.startswith("_") and part[:2] != "__" for part in name.split("."))}
    for name in private:
        is_whole = not any(other.startswith(f"{name}.") for other in private)
        if is_whole and not any(fnmatchcase(name, pattern) for pattern in NO_PATCH):
            yield name
    for node in graph.nodes_of(module, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Call):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and target.attr in ("forward", "__class__"):
                yield target.attr
            elif name := full(target):
                yield name
    for node in graph.nodes_of(module, ast.Call):
        if OF_THE_PROCESS.fullmatch(name := full(node.func)):
            yield name
    for name, line in BY_TEXT.get(module, {}).items():
        assert line in graph.path_of(module).read_text(encoding="utf-8"), f"{module} has no line {line!r} any more"
        yield name


def test_every_patch_and_private_name_has_a_reason():
    missing = [
        f"{module}: {name}"
        for module in graph.modules()
        for name in _found_in(module)
        if not any(fnmatchcase(name, pattern) for pattern in _rows().get(module, ()))
    ]
    assert not missing, f"ask for a public way, or give the reason in {PAGE.name}:\n" + "\n".join(sorted(missing))


def test_the_page_names_nothing_that_is_gone():
    gone = [
        f"{module}: {pattern}"
        for module, patterns in _rows().items()
        for pattern in patterns
        if module not in graph.modules() or not any(fnmatchcase(name, pattern) for name in _found_in(module))
    ]
    assert not gone, f"take out of {PAGE.name}:\n" + "\n".join(gone)


def _has_public(owner: object, *words: str) -> bool:
    names = [name for name in dir(owner) if not name.startswith("_")]
    return any(all(word in name.lower() for word in words) for name in names)


def _text_of(library: str, path: str) -> str:
    """The source of a module of a library, which is not imported. Skips where the library is not installed."""
    found = importlib.util.find_spec(library)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{library} is not installed")
    return Path(found.submodule_search_locations[0], path).read_text(encoding="utf-8")


def _operations(run: Callable[[], object]) -> set[str]:
    """Names of the operations that a dispatch mode sees."""
    seen = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            seen.add(str(operation))
            return operation(*args, **(kwargs or {}))

    with Recorder():
        run()
    return seen


def _transforms_take_hooks() -> bool:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        try:
            torch.func.grad(lambda x: (x * x).sum())(torch.ones(2))
        except RuntimeError:
            return False
    return True


def _torch_warns_of_a_step_without_gradients() -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    return bool(caught)


def _accelerate_keeps_a_loader() -> bool:
    accelerate = pytest.importorskip("accelerate.data_loader")

    class Loader(torch.utils.data.DataLoader):
        def __iter__(self):
            return iter(["its own"] * 2)

    return list(accelerate.skip_first_batches(Loader([1, 2]), 1)) == ["its own"]


STILL_NEEDED: dict[str, tuple[tuple[str, ...], Callable[[], bool]]] = {
    "a tensor without memory whose operations a class carries out": (
        ("torch.Tensor._make_wrapper_subclass",),
        lambda: _has_public(torch.Tensor, "wrapper"),
    ),
    "a storage returns how many owners it has": (
        ("torch._C._storage_Use_Count",),
        lambda: _has_public(torch.UntypedStorage, "use", "count"),
    ),
    "a tensor returns which storage it has, past its subclass": (
        ("torch._C._storage_address",),
        lambda: _has_public(torch.Tensor, "storage", "address"),
    ),
    "autograd returns whether a backward runs": (
        ("torch._C._current_graph_task_id",),
        lambda: _has_public(torch.autograd.graph, "task"),
    ),
    "torch returns whether a profiler runs": (
        ("torch.autograd.profiler._is_profiler_enabled",),
        lambda: _has_public(torch.profiler, "enabled") or _has_public(torch.profiler, "running"),
    ),
    "torch.func returns whether a transform runs": (
        ("torch._C._functorch.*",),
        lambda: any(_has_public(torch.func, word) for word in ("level", "active", "running", "transform")),
    ),
    "autograd calls back at the end of a backward": (
        ("torch.autograd.Variable._execution_engine.queue_callback",),
        lambda: _has_public(torch.autograd.graph, "callback"),
    ),
    "the compiler returns a backend as a function, what it has compiled, and what its graphs keep": (
        (
            "torch._TorchCompileInductorWrapper",
            "torch._TorchCompileWrapper",
            "torch._dynamo.utils.counters",
            "torch._functorch.config.patch",
        ),
        lambda: any(_has_public(torch.compiler, word) for word in ("lookup_backend", "counter", "breaks", "budget")),
    ),
    "torch.compiler.disable does not import the compiler": (
        ("torch._C._dynamo.eval_frame",),
        lambda: "import torch._dynamo" not in inspect.getsource(torch.compiler.disable),
    ),
    "saved-tensor hooks can be read or put below others": (
        ("torch._C._autograd._*",),
        lambda: _has_public(torch.autograd.graph, "saved", "stack"),
    ),
    "transforms of torch.func take hooks on saved tensors": (
        ("torch.autograd.graph.disable_saved_tensors_hooks",),
        _transforms_take_hooks,
    ),
    "a module calls back when its constructor ends": (
        ("torch.nn.Module", "torch.nn.Module.__init__"),
        lambda: _has_public(torch.nn.Module, "init", "hook"),
    ),
    "Transformers does not look for the wrapper of constructors": (
        ("torch", "torch.Tensor"),
        lambda: "zero_wrapper_for_fp_tensor_constructor" not in _text_of("transformers", "integrations/deepspeed.py"),
    ),
    "torch lists its constructors": (
        ("torch.utils._device._device_constructors",),
        lambda: _has_public(torch.overrides, "constructors"),
    ),
    "libraries do not read attributes of sharded parameters": (
        ("torch.nn.Parameter", "torch.Tensor.ds_status"),
        lambda: "ds_numel" not in _text_of("transformers", "trainer_pt_utils.py"),
    ),
    "torch rebuilds a pickled parameter": (
        ("torch._utils._rebuild_parameter",),
        lambda: _has_public(torch.nn.Parameter, "rebuild"),
    ),
    "Transformers calls hooks around its weights and their loading": (
        (
            "PreTrainedModel.initialize_weights",
            "PreTrainedModel._adjust_bias",
            "PreTrainedModel._load_pretrained_model",
        ),
        lambda: any(
            re.search(rf"def register_\w*{word}\w*hook", _text_of("transformers", "modeling_utils.py"))
            for word in ("init", "load", "set")
        ),
    ),
    "Transformers initializes weights on every rank at stage 3": (
        ("transformers.integrations.deepspeed.initialize_weights_zero3",),
        lambda: "def initialize_weights_zero3" not in _text_of("transformers", "integrations/deepspeed.py"),
    ),
    "models of Transformers compute tables on every rank at stage 3": (
        ("transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref",),
        lambda: "_hf_deepspeed_config_weak_ref" not in _text_of("transformers", "integrations/deepspeed.py"),
    ),
    "Transformers takes the function that checkpoints a layer": (
        ("_gradient_checkpointing_func",),
        lambda: "_gradient_checkpointing_func" not in _text_of("transformers", "modeling_layers.py"),
    ),
    "Accelerate keeps the loader whose batches it skips": (
        ("accelerate.data_loader.skip_first_batches",),
        _accelerate_keeps_a_loader,
    ),
    "Accelerate saves the number of the pass that a stateful loader is in": (
        ("accelerate.data_loader.DataLoaderShard",),
        lambda: '"_iteration"' in _text_of("accelerate", "data_loader.py"),
    ),
    "autocast has rules for the meta device": (
        ("torch.autocast", "torch.is_autocast_enabled", "torch.get_autocast_dtype"),
        lambda: torch.amp.is_autocast_available("meta"),
    ),
    "autocast lists its operations": (
        ("torch._C.*",),
        lambda: any(_has_public(torch.amp, word) for word in ("list", "operation", "ops", "rules")),
    ),
    "torch keeps freed host memory by itself": (
        ("mallopt",),
        lambda: any(_has_public(torch.cpu, word) for word in ("alloc", "empty_cache", "pool")),
    ),
    "operations on lists of tensors have public names": (("torch._foreach_*",), lambda: _has_public(torch, "foreach")),
    "fused updates have public names": (("torch._fused_*",), lambda: _has_public(torch.optim, "fused_adam")),
    "an optimizer calls its hooks when it is asked to": (
        ("torch.optim.optimizer._global_optimizer_*",),
        lambda: _has_public(torch.optim.Optimizer, "call", "hook"),
    ),
    "an optimizer warns of a step without gradients": (
        ("torch.optim.optimizer.register_optimizer_step_pre_hook",),
        _torch_warns_of_a_step_without_gradients,
    ),
    "a module calls back around the forwards of those inside it": (
        (
            "torch.nn.modules.module.register_module_forward_pre_hook",
            "torch.nn.modules.module.register_module_forward_hook",
        ),
        lambda: any(_has_public(torch.nn.Module, *words) for words in (("recursive", "hook"), ("children", "hook"))),
    ),
    "packed products have public names": (
        ("torch._convert_weight_to_int4pack_for_cpu", "torch._weight_int4pack_mm_for_cpu", "torch._weight_int8pack_mm"),
        lambda: _has_public(torch, "int4pack") or _has_public(torch, "int8pack"),
    ),
    "attention returns its log-sum-exp": (
        (
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu*",
            "torch.ops.aten._scaled_dot_product_flash_attention*",
        ),
        lambda: _has_public(torch.nn.functional, "attention", "lse"),
    ),
    "collectives can be put together": (
        ("torch.distributed.distributed_c10d._coalescing_manager",),
        lambda: _has_public(torch.distributed, "coalescing"),
    ),
    "a process group is aborted, and gets another time limit": (
        (
            "torch.distributed.distributed_c10d._abort_process_group",
            "torch.distributed.distributed_c10d._set_pg_timeout",
        ),
        lambda: _has_public(torch.distributed, "abort") or _has_public(torch.distributed, "set", "timeout"),
    ),
    "the process groups of a job are listed": (
        ("torch.distributed.distributed_c10d._world.*",),
        lambda: any(_has_public(torch.distributed, *words) for words in (("list", "group"), ("all", "groups"))),
    ),
    "the default store of a job can be had": (
        ("torch.distributed.distributed_c10d._get_default_store",),
        lambda: _has_public(torch.distributed, "default_store"),
    ),
    "a subclass of Tensor can leave functions alone by a public name": (
        ("torch._C._disabled_torch_function_impl",),
        lambda: _has_public(torch.overrides, "disabled"),
    ),
    "an operation returns whether it is composed of others": (
        ("torch._C.DispatchKey.CompositeImplicitAutograd",),
        lambda: _has_public(torch.ops.aten.add.Tensor, "composite"),
    ),
    "tensor.item() is an operation with a public name": (
        ("torch.ops.aten._local_scalar_dense.default",),
        lambda: "aten._local_scalar_dense.default" not in _operations(lambda: torch.ones(1).item()),
    ),
    "a matrix product has no operation of a private name": (
        ("torch.ops.aten._unsafe_view.default",),
        lambda: "aten._unsafe_view.default" not in _operations(lambda: torch.ones(2, 3, 4) @ torch.ones(4, 5)),
    ),
    "the generator of Apple's devices can be had": (
        ("torch.mps._get_default_mps_generator",),
        lambda: _has_public(torch.mps, "generator"),
    ),
    "trainers do not ask forward for its signature": (
        ("forward",),
        lambda: "inspect.signature(model_to_inspect.forward)" not in _text_of("transformers", "trainer.py"),
    ),
}
"""What would make rows needless -> names that they give, and whether the installed libraries have it."""

OUR_DESIGN = ("__class__",)
"""What the model's own objects are changed in; no library could take that over."""


def test_every_row_has_a_check_of_its_need():
    named = {name for names in _rows().values() for name in names}
    checked = {name for names, _ in STILL_NEEDED.values() for name in names}
    assert not named - checked - set(OUR_DESIGN), "say in STILL_NEEDED what would make these rows needless"
    assert not checked - named, f"take out of STILL_NEEDED: {PAGE.name} has no such names"


@pytest.mark.parametrize("reason", STILL_NEEDED)
def test_there_is_still_no_public_way(reason):
    names, is_there = STILL_NEEDED[reason]
    assert not is_there(), f"torch {torch.__version__}: {reason}; take it, and {', '.join(names)} out of {PAGE.name}"


@cache
def _private_names() -> dict[str, str]:
    """Private name -> module of the library that has it, as the page lists them."""
    found: dict[str, str] = {}
    for line in PAGE.read_text(encoding="utf-8").partition("## Private names of Transformers")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`_"):
            assert cells[2], f"{PAGE.name}: {cells[0]} has no reason"
            found.update(dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), cells[1].strip("`")))
    return found


@cache
def _private_names_used() -> dict[str, str]:
    """Private name that the package does not define -> a module that uses it, of those that meet libraries."""
    defined: set[str] = set()
    for module in graph.modules():
        for node in graph.nodes_of(module, ast.FunctionDef, ast.ClassDef):
            defined.add(node.name)
        for node in graph.nodes_of(module, ast.Name):
            if isinstance(node.ctx, ast.Store):
                defined.add(node.id)
        for node in graph.nodes_of(module, ast.Attribute):
            if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
                defined.add(node.attr)
    used: dict[str, str] = {}
    for module in graph.modules():
        if not module.startswith((*MEET_LIBRARIES, "deepspeed.zero.construction.model_files")):
            continue
        patched = {name.rpartition(".")[2] for name in _found_in(module)}
        names = [node.attr for node in graph.nodes_of(module, ast.Attribute)]
        parts = {part for node in graph.nodes_of(module, ast.JoinedStr) for part in node.values}
        texts = [node for node in graph.nodes_of(module, ast.Constant) if node not in parts]
        names += [node.value for node in texts if isinstance(node.value, str)]
        for name in names:
            is_private = re.fullmatch(r"_[a-z]\w*", name) and not name.startswith(("_ds_", "_deepspeed_", *OF_FILES))
            if is_private and name not in defined | patched | OF_PYTHON | OF_OURS:
                used[name] = module
    return used


def test_private_names_of_objects_have_a_reason():
    missing = {name: module for name, module in _private_names_used().items() if name not in _private_names()}
    assert not missing, f"ask for a public way, or give the reason in {PAGE.name}: {missing}"
    gone = sorted(set(_private_names()) - set(_private_names_used()))
    assert not gone, f"take out of {PAGE.name}: {gone}"


@pytest.mark.parametrize("name", _private_names())
def test_the_library_still_has_the_private_name(name):
    library, _, module = _private_names()[name].partition(".")
    path = f"{module.replace('.', '/')}.py"
    assert re.search(rf"\b{name}\b", _text_of(library, path)), f"{library} has no {name} any more: change what reads it"
