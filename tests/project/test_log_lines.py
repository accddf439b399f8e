"""Log lines come from rank 0, or name the rank that they come from."""

import ast

from tests.project import graph

ONE_PROCESS = "a process that starts ranks, or a command: there is one"
FIRST_RANK = "runs on rank 0 only"
NAMED = "runs before log_dist knows the rank, or is about one rank: the text names it"
DIRECT = {
    "deepspeed.autotuning.autotuner": ONE_PROCESS,
    "deepspeed.checkpoint.commit": FIRST_RANK,
    "deepspeed.checkpoint.param_groups": FIRST_RANK,
    "deepspeed.checkpoint.save": FIRST_RANK,
    "deepspeed.checkpoint.states": FIRST_RANK,
    "deepspeed.checkpoint.writer": FIRST_RANK,
    "deepspeed.comm.start.admission": NAMED,
    "deepspeed.comm.start.mpi": NAMED,
    "deepspeed.comm.start.rendezvous": NAMED,
    "deepspeed.comm.watch.posts": NAMED,
    "deepspeed.comm.watch.watchdog": NAMED,
    "deepspeed.elasticity.restore": "a debug line",
    "deepspeed.launcher.environment": ONE_PROCESS,
    "deepspeed.launcher.forked": ONE_PROCESS,
    "deepspeed.launcher.front": ONE_PROCESS,
    "deepspeed.launcher.launch": ONE_PROCESS,
    "deepspeed.launcher.ports": ONE_PROCESS,
    "deepspeed.launcher.runner": ONE_PROCESS,
    "deepspeed.launcher.selection": ONE_PROCESS,
    "deepspeed.logging": "log_dist itself",
    "deepspeed.monitor.monitor": FIRST_RANK,
    "deepspeed.ops.onebit.phases": "the optimizer tells it whether this rank logs",
}
"""Modules that call the logger directly, and why each line is written once or names its rank."""

LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def _calls_logger(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LEVELS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "logger"
        for node in ast.walk(tree)
    )


def test_only_listed_modules_call_the_logger_directly():
    """On N ranks such a call writes the same line N times. Use ``log_dist``; ``ranks=[-1]`` names each rank."""
    found = {module for module in graph.modules() if _calls_logger(graph.tree_of(module))}
    assert found == set(DIRECT)
