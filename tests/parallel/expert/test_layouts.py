"""Models of one process whose experts are laid out differently: an engine's groups end with it."""

import pytest

from deepspeed.comm.job import groups
from deepspeed.comm.job.job import Job
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from tests.engine.support import SHARDED, engine_of, inputs, rank
from tests.harness import on_ranks
from tests.harness.toy_models import tower
from tests.parallel.expert.test_combinations import _losses, _net
from tests.parallel.expert.test_layer import Net, compare


@on_ranks(4)
def test_layouts_follow_each_other() -> None:
    compare(4, (2, 2), 2, 1, 0.2)  # neighbors share experts
    assert Job.adopt().declared.defined() == {}
    compare(4, (2, 2), 3, 1, 0.2, use_data_before_expert_parallelism=True)  # and now ranks that are two apart
    # ZeRO++ groups neighbors for all parameters, which is refused where some have groups of their own.
    engine = engine_of(tower(), 3, zero={**SHARDED, "zero_hpz_partition_size": 2})
    engine.backward(engine(inputs(0, rank())))
    engine.step()
    engine.destroy()


@on_ranks(4)
def test_the_configuration_lays_out_the_experts_of_a_model_built_before() -> None:
    model = Net((2, 2))
    assert Job.adopt().declared.defined() == {}
    engine = engine_of(model, 1, use_data_before_expert_parallelism=True)
    assert Job.adopt().experts.ranks_of(2)[0] == (rank() % 2, rank() % 2 + 2)
    engine.destroy()


@on_ranks(4)
def test_groups_stay_as_long_as_they_are_needed() -> None:
    """Groups stay while an engine needs them, or a model that no engine has taken yet."""
    first, second = engine_of(_net(2), 1), engine_of(_net(2), 2)
    with pytest.raises(DeepSpeedConfigError, match=r"as for earlier layers.* call its destroy\(\) first"):
        groups._create_expert_and_data_parallel(2, use_data_before_expert_parallel_=True)
    expected = _losses(first)
    first.destroy()
    first.destroy()
    with pytest.raises(DeepSpeedConfigError, match="as for earlier layers"):
        groups._create_expert_and_data_parallel(2, use_data_before_expert_parallel_=True)
    assert _losses(second) == pytest.approx(expected, abs=1e-6)
    groups._create_expert_and_data_parallel(2)  # for a third model
    second.destroy()
    assert groups._get_expert_parallel_group_ranks("ep_size_2") == [rank() // 2 * 2, rank() // 2 * 2 + 1]
    third = engine_of(_net(2), 0)
    assert _losses(third) == pytest.approx(expected, abs=1e-6)
    third.destroy()
    with pytest.raises(CallOrderError, match="does not exist yet"):
        groups._get_expert_parallel_group("ep_size_2")
    groups._create_expert_and_data_parallel(2, use_data_before_expert_parallel_=True)
    assert Job.adopt().experts.ranks_of(2)[0] == (rank() % 2, rank() % 2 + 2)


@on_ranks(2)
def test_copies_of_a_pipeline_end_with_it() -> None:
    Job.adopt().declared.define_copies("tied", [[0, 1]])
    engine = engine_of(tower(), 1)
    with pytest.raises(DeepSpeedConfigError, match=r"the name is taken.*destroy\(\) of the 1 engine"):
        Job.adopt().declared.define_copies("tied", [[0], [1]])
    engine.destroy()
    Job.adopt().declared.define_copies("tied", [[0], [1]])
    assert Job.adopt().declared.defined()["tied"].ranks == ((0,), (1,))
