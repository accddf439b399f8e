"""Imports point one way, communication goes through two packages, nothing prints, and `import deepspeed` is light."""

import ast
import subprocess
import sys

from tests.project import graph, layers

MAY_IMPORT_TORCH_DISTRIBUTED = ("comm", "parallel")
# torch's elastic agent starts processes, and its distributed checkpoint is files; neither exchanges tensors here.
WITHOUT_EXCHANGE = {"elasticity": "torch.distributed.elastic.", "checkpoint": "torch.distributed.checkpoint."}


def _part(module: str) -> str | None:
    """The package right under the root; None for the root itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def test_no_cycles():
    cycles = graph.cycles(graph.edges())
    assert not cycles, "modules that import each other:\n" + "\n".join(" <-> ".join(cycle) for cycle in cycles)


def test_cycles_are_found():
    assert graph.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert graph.cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert graph.cycles({"a": {"a"}}) == [["a"]]


def test_imports_point_one_way():
    wrong = []
    for entry in graph.imports():
        importer, imported = _part(entry.importer), _part(entry.imported)
        if not entry.imported.startswith("deepspeed.") or importer is None or imported is None:
            continue
        if layers.layer_of(imported) > layers.layer_of(importer):
            wrong.append(str(entry))
    assert not wrong, "imports of a higher layer:\n" + "\n".join(wrong)


def test_imports_inside_comm_point_down():
    wrong = []
    for entry in graph.imports():
        importer, imported = layers.floor_of(entry.importer), layers.floor_of(entry.imported)
        if importer is None or imported is None or entry.importer.split(".")[2] == entry.imported.split(".")[2]:
            continue
        if imported >= importer:
            wrong.append(str(entry))
    assert not wrong, "imports of the same or a higher floor of deepspeed.comm:\n" + "\n".join(wrong)


CHOOSES_FOR_ONE_HOST = "deepspeed.comm.job.connect"


def test_one_module_chooses_what_serves_ranks_of_one_host():
    host = "deepspeed.comm.host"
    wrong = [
        str(entry)
        for entry in graph.imports()
        if entry.imported.startswith(host) and not entry.importer.startswith((host, CHOOSES_FOR_ONE_HOST))
    ]
    assert not wrong, f"only {CHOOSES_FOR_ONE_HOST} imports from {host}:\n" + "\n".join(wrong)


def test_every_package_states_its_job():
    packages = [name.partition(".")[2] for name, path in graph.modules().items() if path.name == "__init__.py"]
    short = {package: job for package in packages if package and len((job := layers.job_of(package)).split()) < 3}
    assert not short, f"say in the first line of the docstring what these do: {short}"


def test_page_of_the_layers_is_in_step():
    assert layers.PAGE.read_text(encoding="utf-8") == layers.page(), "run: python -m tests.project.layers"


def test_only_two_packages_import_torch_distributed():
    wrong = [
        str(entry)
        for entry in graph.imports()
        if (entry.imported + ".").startswith("torch.distributed.")
        and _part(entry.importer) not in MAY_IMPORT_TORCH_DISTRIBUTED
        and not (entry.imported + ".").startswith(WITHOUT_EXCHANGE.get(_part(entry.importer) or "", "nothing"))
    ]
    for module in graph.modules():
        if _part(module) in MAY_IMPORT_TORCH_DISTRIBUTED:
            continue
        for node in graph.nodes_of(module, ast.Attribute):
            if node.attr == "distributed" and ast.unparse(node) == "torch.distributed":
                wrong.append(f"{graph.path_of(module)}:{node.lineno} uses torch.distributed")
    assert not wrong, "torch.distributed outside deepspeed/comm and deepspeed/parallel:\n" + "\n".join(wrong)


def test_nothing_prints():
    wrong = [
        f"{graph.path_of(module)}:{node.lineno}"
        for module in graph.modules()
        for node in graph.nodes_of(module, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id in ("print", "pprint")
    ]
    assert not wrong, "use deepspeed.logging or a rich Console instead of print:\n" + "\n".join(wrong)


LIGHT_IMPORT = """
import sys, torch
before = set(sys.modules)
import deepspeed
heavy = {"transformers", "accelerate", "lightning", "tensorboard", "matplotlib", "wandb", "scipy", "pandas", "triton"}
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} & heavy))
print(torch.cuda.is_initialized(), torch.distributed.is_initialized())
"""


def test_import_is_silent_and_light():
    done = subprocess.run([sys.executable, "-c", LIGHT_IMPORT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["[]", "False False"]
    assert done.stderr == ""
