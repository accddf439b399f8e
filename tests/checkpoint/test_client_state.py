"""What callers put into a checkpoint comes back; what only code could restore comes back on request."""

import argparse
import collections
import datetime
import logging
import pathlib
import types
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.checkpoint import restricted
from deepspeed.errors import CheckpointError
from deepspeed.pipe import PipelineModule
from tests.checkpoint.training import config, engine, train
from tests.harness import assert_states_equal, run_ranks


class Custom:
    """Something that the allow-list does not know."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value


class Doubling:
    """A learning-rate function with a state, as LambdaLR saves it."""

    def __init__(self) -> None:
        self.held = Custom(5)

    def __call__(self, step: int) -> float:
        return 1.0 / (1 + step)


PLAIN = {
    "int": 2**70,
    "float": 0.1,
    "complex": 1j,
    "text": "epoch",
    "bytes": b"\x00\xff",
    "none": None,
    "tuple": (1, (2.5, "x")),
    "set": {1, 2},
    "frozenset": frozenset({3}),
    "nested": {"a": [{"b": torch.arange(3)}]},
    "tensor": torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "dtype": torch.float16,
    "array": numpy.linspace(0, 1, 5),
    "strings": numpy.array(["a", "bc"]),
    "record": numpy.zeros(2, dtype=[("x", "i4"), ("y", "f8")]),
    "scalar": numpy.float32(1.5),
    "count": numpy.int64(3),
    "flag": numpy.bool_(True),
    "namespace": argparse.Namespace(lr=0.1, names=["a"]),
    "path": pathlib.Path("/some/where") / "x",
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "defaults": collections.defaultdict(list, {"k": [1]}),
    "counter": collections.Counter("aab"),
    "deque": collections.deque([1, 2], maxlen=5),
    "when": datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.timezone.utc),
    "day": datetime.date(2024, 2, 29),
    "long": datetime.timedelta(hours=3),
    "rng": numpy.random.RandomState(3).get_state(),
}


def _optimizer_files(folder: str) -> list[list[str]]:
    """Names by which tools recognize a sharded checkpoint, at stages 0 and 1."""
    for stage in (0, 1):
        engine(stage).save_checkpoint(folder, tag=f"stage{stage}")
    tags = [pathlib.Path(folder) / f"stage{stage}" for stage in (0, 1)]
    return [[path.name for path in tag.glob("*optim_states.pt")] for tag in tags]


def test_sharded_stages_write_the_file_of_optimizer_states(tmp_path):
    assert run_ranks(_optimizer_files, 1, str(tmp_path)) == [[[], ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]]]


def test_plain_things_pass_the_restricted_loader():
    kept, refused = restricted.split(PLAIN)
    assert kept is PLAIN and not refused
    back = restricted.loads(restricted.dumps(PLAIN), "here")
    assert back.keys() == PLAIN.keys()
    for key, value in PLAIN.items():
        assert type(back[key]) is type(value), key
        if not isinstance(value, (torch.Tensor, numpy.ndarray, tuple, dict)):
            assert back[key] == value, key
    assert_states_equal(back["tensor"], PLAIN["tensor"])
    assert_states_equal(back["nested"], PLAIN["nested"])
    assert_states_equal(back["array"], PLAIN["array"])
    assert back["defaults"]["new"] == [] and back["deque"].maxlen == 5
    assert back["record"].dtype == PLAIN["record"].dtype
    assert back["strings"].tolist() == ["a", "bc"]


def test_only_what_is_odd_is_set_apart():
    state = {"a": 1, "odd": Custom(1), "deep": {"fine": [1], "more": {"odd": [Custom(2)], "fine": 3}}, "f": lambda: 1}
    kept, refused = restricted.split(state)
    assert kept == {"a": 1, "deep": {"fine": [1], "more": {"fine": 3}}}
    assert {restricted.describe(path) for path in refused} == {"odd", "deep['more']['odd']", "f"}
    assert set(state) == {"a", "odd", "deep", "f"} and set(state["deep"]["more"]) == {"odd", "fine"}
    del refused[("f",)]
    restricted.merge(kept, refused)
    assert kept == {key: value for key, value in state.items() if key != "f"}


def test_large_tensors_are_not_pickled_twice(monkeypatch):
    sizes = []
    original = restricted.dumps
    monkeypatch.setattr(restricted, "dumps", lambda value: sizes.append(len(made := original(value))) or made)
    restricted.split({"ema": {"weight": torch.zeros(1 << 20)}, "odd": Custom(1)})
    assert max(sizes) < 100_000


def save_odd(folder: str):
    records: list[str] = []

    class Catch(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    handler = Catch()
    deepspeed.logger.addHandler(handler)
    try:
        run = engine(1, "fp32")
        state = {"fine": 1, "odd": Custom(7), "nested": {"odd": Custom(8), "fine": 2}} if run.global_rank == 0 else {}
        run.save_checkpoint(folder, client_state=state)
        _, without = run.load_checkpoint(folder)
        _, with_all = run.load_checkpoint(folder, allow_pickled_objects=True)
    finally:
        deepspeed.logger.removeHandler(handler)
    return without, with_all, records


def test_odd_objects_are_named_and_come_back_on_request(tmp_path):
    (without, with_all, records), (other, other_all, _) = run_ranks(save_odd, 2, str(tmp_path))
    for state in (without, other):
        assert state["fine"] == 1 and state["nested"] == {"fine": 2} and "odd" not in state
    for state in (with_all, other_all):
        assert state["odd"] == Custom(7) and state["nested"] == {"odd": Custom(8), "fine": 2}
    text = "\n".join(records)
    assert "odd (Custom) is saved in a separate file" in text and "nested['odd']" in text
    assert "not restored, because that would run code: odd, nested['odd']" in text


def save_unpicklable(folder: str):
    run = engine(1, "fp32")
    with pytest.raises(CheckpointError, match="hook: a function object cannot be pickled") as raised:
        run.save_checkpoint(folder, client_state={"hook": lambda: 1})
    return str(raised.value)


def test_what_nothing_can_save_is_an_error_on_every_rank(tmp_path):
    first, second = run_ranks(save_unpicklable, 2, str(tmp_path / "here"))
    assert first == second and not (tmp_path / "here").exists()


def returned_keys(folder: str):
    run = engine(2, "bf16")
    train(run, range(1))
    run.save_checkpoint(folder, client_state={"mine": 1, "global_step": 12})
    _, full = run.load_checkpoint(folder)
    _, no_scheduler = run.load_checkpoint(folder, load_lr_scheduler_states=False)
    _, no_optimizer = run.load_checkpoint(folder, load_optimizer_states=False)
    steps = run.global_steps
    fresh = engine(2, "bf16", seed=8)
    _, module_only = fresh.load_checkpoint(folder, load_module_only=True)
    return full, no_scheduler, no_optimizer, module_only, steps, fresh.global_steps


def test_returned_client_state_has_the_keys_that_the_ecosystem_expects(tmp_path):
    full, no_scheduler, no_optimizer, module_only, steps, fresh_steps = run_ranks(returned_keys, 2, str(tmp_path))[1]
    expected = {"ds_config", "ds_version", "param_shapes", "buffer_names", "global_samples", "shared_params", "mine"}
    engines_own = {"module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size"}
    for state in (full, no_scheduler, no_optimizer):
        assert expected <= set(state) and not engines_own & set(state)
        assert state["mine"] == 1 and state["global_step"] == 12
    assert "lr_scheduler" not in full and "optimizer" not in full
    assert no_scheduler["lr_scheduler"] == {"last_batch_iteration": 0} and "optimizer" in no_optimizer
    assert {"global_steps", "dp_world_size"} <= set(module_only)
    assert not {"module", "optimizer", "lr_scheduler"} & set(module_only)
    assert steps == 1 and fresh_steps == 0
    assert full["shared_params"] == {"head.weight": "embed.weight"}
    assert full["param_shapes"][0]["embed.weight"] == torch.Size([11, 9])
    assert full["buffer_names"] == ["seen", "mean"]


def odd_schedule(folder: str):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, Doubling())
    made = {**config(1, "fp32"), "scheduler": None, "optimizer": None}
    made = {key: value for key, value in made.items() if value is not None}
    run = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=made)[0]
    run.save_checkpoint(folder)
    with pytest.raises(CheckpointError, match="lr_scheduler.*allow_pickled_objects=True"):
        run.load_checkpoint(folder)
    run.load_checkpoint(folder, load_lr_scheduler_states=False)
    schedule.lr_lambdas[0].held = None
    run.load_checkpoint(folder, allow_pickled_objects=True)
    return schedule.lr_lambdas[0].held


def test_a_schedule_is_not_restored_in_part(tmp_path):
    assert run_ranks(odd_schedule, 1, str(tmp_path)) == [Custom(5)]


def save_with_a_function(folder: str):
    def constant(step: int) -> float:
        return 0.5

    scheduler = {"type": "LambdaLR", "params": {"lr_lambda": [constant]}}
    zero = types.MappingProxyType({"stage": 1})
    made = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_optimization": zero}
    made["comet"] = {"api_key": "secret", "project": "open"}
    run = deepspeed.initialize(model=nn.Linear(4, 4), config={**made, "scheduler": scheduler})[0]
    run.save_checkpoint(folder)
    config_in_file = run.load_checkpoint(folder)[1]["ds_config"]
    return config_in_file, run.config["scheduler"]["params"]["lr_lambda"][0] is constant


def test_functions_of_the_configuration_are_saved_as_text_and_secrets_not_at_all(tmp_path):
    ((saved, is_kept),) = run_ranks(save_with_a_function, 1, str(tmp_path))
    assert "constant" in saved["scheduler"]["params"]["lr_lambda"] and is_kept
    assert saved["comet"] == {"api_key": "(not shown)", "project": "open"}
    assert saved["zero_optimization"] == {"stage": 1} and saved["optimizer"]["params"] == {"lr": 1.0}
    assert not list(tmp_path.rglob("*objects*")), "restoring a configuration needs no code"


class StatefulData:
    """A loader of the program's own, whose state is any object."""

    def __init__(self, held: object) -> None:
        self.held = held

    def state_dict(self) -> dict:
        return {"held": self.held}

    def load_state_dict(self, state: dict) -> None:
        self.held = state["held"]


def restore_odd_loader(folder: str):
    run = engine(1, "fp32")
    run.training_dataloader = StatefulData(Custom(7))
    run.save_checkpoint(folder)
    found = []
    for trust in (False, True):
        run.training_dataloader = StatefulData(None)
        run.load_checkpoint(folder, allow_pickled_objects=trust)
        found.append(run.training_dataloader.held)
    return found


def test_odd_state_of_a_loader_comes_back_on_request(tmp_path):
    (without, trusted), *_ = run_ranks(restore_odd_loader, 1, str(tmp_path))
    assert without is None and trusted == Custom(7)


def keep_reserved_keys(folder: str, entries: dict):
    run = engine(1, "fp32")
    run.save_checkpoint(folder, client_state=entries)
    _, found = run.load_checkpoint(folder)
    _, module_only = run.load_checkpoint(folder, load_module_only=True)
    return [{key: state.get(key) for key in entries} for state in (found, module_only)]


def test_keys_that_the_engine_uses_too_come_back(tmp_path):
    entries = {"data_position": 5, "quantization_pace": [1], "client_entries": "mine", "epoch": 2}
    (states, *_) = run_ranks(keep_reserved_keys, 1, str(tmp_path), entries)
    assert states == [entries, entries]


class Stateful(torch.nn.Linear):
    """Has an extra state that only code restores."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def save_odd_extra_state_of_stages(folder: str) -> Any:
    layers = [Stateful(8, 8) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    adam = {"type": "Adam", "params": {"lr": 0.1}}
    run, *_ = deepspeed.initialize(model=model, config={"train_batch_size": 2, "optimizer": adam})
    (own,) = (layer for layer in model.modules() if isinstance(layer, Stateful))
    own.extra = Custom(7 + run.stage_id)
    run.save_checkpoint(folder)
    own.extra = None
    run.load_checkpoint(folder)
    assert own.extra is None
    run.load_checkpoint(folder, allow_pickled_objects=True)
    return own.extra


def test_odd_extra_states_of_stages_cross_unopened(tmp_path):
    assert run_ranks(save_odd_extra_state_of_stages, 2, str(tmp_path)) == [Custom(7), Custom(8)]
