"""The methods that return values of the configuration (``engine.accessors``)."""

from __future__ import annotations

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
