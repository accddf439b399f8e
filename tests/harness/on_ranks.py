"""Tests whose body runs on every rank: ``@on_ranks(2)`` in processes, ``@on_threads(2)`` in threads.

@on_ranks(2, 3)                       # once with two ranks, once with three
def test_sum(rank, ranks):            # `rank` and `ranks` are given, all others are fixtures and parameters of pytest
    x = torch.ones(3) * rank
    dist.all_reduce(x)
    assert x[0] == sum(range(ranks))

A test that looks at what the ranks return calls ``run_ranks`` or ``run_threads`` by itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests.harness.pool import run_ranks

Test = Callable[..., None]


def on_ranks(*counts: int, **options: Any) -> Callable[[Test], Test]:
    """Decorates a test that each of ``counts`` ranks runs; with no count, the parameter ``ranks`` has it.

    Every rank finds what :func:`run_ranks` gives it, as ``rank`` and ``ranks`` if the test has such parameters. What
    pytest passes (``tmp_path``) travels by pickle.

    Args:
        *counts: Numbers of ranks; several make a test for each.
        **options: Of :func:`run_ranks`: ``timeout``, ``env``, ``fresh``, ``backend``.
    """

    def decorate(test: Test) -> Test:
        def start(size: int, arguments: dict[str, Any]) -> None:
            run_ranks(_run_body, size, run, arguments, **options)

        run = _seen_by_pytest(start, test, counts, {"rank"})
        return run

    return decorate


def on_threads(*counts: int) -> Callable[[Test], Test]:
    """Decorates a test that each of ``counts`` threads runs as a rank; its parameter ``transport`` leads to the others.

    Args:
        *counts: Numbers of ranks, as of :func:`on_ranks`.
    """

    def decorate(test: Test) -> Test:
        def start(size: int, arguments: dict[str, Any]) -> None:
            from tests.harness.loopback import run_threads  # imports the package, which servers of workers do not

            given = {"ranks": size} if "ranks" in inspect.signature(test).parameters else {}
            run_threads(lambda transport: test(transport=transport, **{**arguments, **given}), size)

        return _seen_by_pytest(start, test, counts, {"transport"})

    return decorate


def _seen_by_pytest(start: Callable[..., None], test: Test, counts: tuple[int, ...], own: set[str]) -> Test:
    """The test as pytest sees it: without the parameters that ranks get, and with ``ranks`` if it varies."""
    varies = len(counts) != 1

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        start(arguments["ranks"] if varies else counts[0], arguments)

    parameters = [*inspect.signature(test).parameters.values()]
    if varies and "ranks" not in [parameter.name for parameter in parameters]:
        parameters.append(inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY))
    hidden = own if varies else {*own, "ranks"}
    run.__signature__ = inspect.Signature([p for p in parameters if p.name not in hidden])  # type: ignore[attr-defined]
    if len(counts) < 2:
        return run
    import pytest

    return pytest.mark.parametrize("ranks", counts)(run)


def _run_body(test: Test, arguments: dict[str, Any]) -> None:
    body = inspect.unwrap(test)
    given = {"rank": dist.get_rank(), "ranks": dist.get_world_size()} if dist.is_initialized() else {}
    names = inspect.signature(body).parameters
    body(**{name: value for name, value in {**arguments, **given}.items() if name in names})
