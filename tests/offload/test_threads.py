"""Threads of updates on the host: each rank's share of the cores, unless the program has set a number itself."""

from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.offload import threads
from deepspeed.offload.threads import choose_threads
from tests.harness import on_ranks
from tests.offload.training import config

_TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "current", "ranks", "expected"),
    [
        ({}, 64, 8, 8),  # `deepspeed` on a node of GPUs, srun, mpirun: nobody sets a number
        ({}, 32, 8, 8),  # MKL leaves the second threads of cores out
        ({}, 64, 3, 21),
        ({}, 64, 100, 1),
        ({}, 6, 8, None),  # torch.set_num_threads(6)
        (_TORCHRUN, 1, 8, 8),
        (_TORCHRUN, 6, 8, None),
        ({**_TORCHRUN, "OMP_NUM_THREADS": "4"}, 4, 8, None),
        ({"OMP_NUM_THREADS": "1"}, 1, 8, None),  # no torchrun: the user's
        ({"TORCHELASTIC_RUN_ID": "none"}, 64, 1, 64),  # torchrun with one rank sets none
        ({**_TORCHRUN, "MKL_NUM_THREADS": "2"}, 1, 8, None),
    ],
)
def test_the_program_comes_first(environment: dict[str, str], current: int, ranks: int, expected: int | None) -> None:
    assert choose_threads(environment, current, {64, 32}, 64, ranks) == expected


def _engine(**zero: Any) -> Any:
    model = torch.nn.Linear(8, 8)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(2, **zero))[0]


@on_ranks(2)
def test_engines_hold_the_share(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}}
    for name, value in _TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: set(range(6)))
    _engine().destroy()
    before = torch.get_num_threads()
    first = _engine(**offload)
    second = _engine(**offload)
    assert (before, torch.get_num_threads()) == (1, 3)
    first.destroy()
    assert torch.get_num_threads() == 3  # the second one's too
    second.destroy()
    second.destroy()
    assert torch.get_num_threads() == 1

    monkeypatch.setattr(threads, "usable_cores", lambda: {2 * rank, 2 * rank + 1})  # bound to cores of its own
    engine = _engine(**offload)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(4)
    engine.destroy()
    assert torch.get_num_threads() == 4  # the program's own number stays
    _engine(**offload).destroy()
    assert torch.get_num_threads() == 4
    torch.set_num_threads(1)
