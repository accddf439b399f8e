"""The methods that return values of the configuration (``engine.accessors``)."""

from typing import Any

from deepspeed.engine.accessors import ConfigAccessors
from tests.config.support import read


def accessors(offload: dict[str, Any] | None) -> ConfigAccessors:
    made = ConfigAccessors()
    zero = {"stage": 2} if offload is None else {"stage": 2, "offload_optimizer": offload}
    made._root = read({"train_batch_size": 1, "zero_optimization": zero}).root
    return made


def test_cores_of_an_offloaded_update() -> None:
    assert accessors(None).cpuadam_cores_perc() == 0.9 and not accessors(None).super_offload()
    given = accessors({"device": "cpu", "cpuadam_cores_perc": 0.5})
    assert given.cpuadam_cores_perc() == 0.5 and not given.super_offload()


def test_switches_of_sections_that_are_left_out() -> None:
    given, left_out = ConfigAccessors(), accessors(None)
    given._root = read(
        {"train_batch_size": 1, "sparse_gradients": True, "graph_harvesting": True, "autotuning": {"enabled": True}}
        | {"eigenvalue": {"enabled": True}, "amp": {"enabled": False}}
    ).root
    for name in ("sparse_gradients", "autotuning", "eigenvalue"):
        assert getattr(given, f"{name}_enabled")() is True and getattr(left_out, f"{name}_enabled")() is False, name
    assert given.graph_harvesting() is True and left_out.graph_harvesting() is False
    assert given.amp_enabled() is False and left_out.amp_enabled() is False
