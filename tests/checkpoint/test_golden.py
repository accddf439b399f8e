"""Checkpoints that earlier format versions wrote stay readable, to the bit, at any topology."""

import json
import zipfile

import pytest

from deepspeed.checkpoint import inspect
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint.golden.make import HERE, MADE, TAG, digests, plain
from tests.checkpoint.training import Net, engine, fragments, joined, other_state
from tests.harness import assert_states_equal, run_ranks

KEPT = sorted(f"{path.parent.name}/{path.stem}" for path in HERE.glob("version*/*.zip"))
STAGES = dict(zip(MADE, (3, 1, 3, 0), strict=True))
"""At which stage each of them is read; two ranks read all."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every kept checkpoint, unpacked."""
    root = tmp_path_factory.mktemp("golden")
    for name in KEPT:
        with zipfile.ZipFile(HERE / f"{name}.zip") as archive:
            archive.extractall(root / name)
    return root


def load(root: str, names: list[str]):
    """What two ranks hold after loading."""
    found = {}
    for name in names:
        _, _, precision, exclude_frozen = MADE[name.split("/")[1]]
        run = engine(STAGES[name.split("/")[1]], precision, seed=8)
        _, client_state = run.load_checkpoint(f"{root}/{name}", load_module_strict=not exclude_frozen)
        assert client_state["note"] == "hello"
        found[name] = fragments(run), other_state(run)
        run.destroy()
    return found


def test_older_versions_load_elsewhere(folders):
    assert len(KEPT) >= 4
    result = run_ranks(load, 2, str(folders), KEPT, timeout=200)
    for name in KEPT:
        expected = json.loads((folders / name / "values.json").read_text())
        held = digests(joined([entry[name][0] for entry in result]))
        left_out = {key for key in held if MADE[name.split("/")[1]][3] and "/frozen." in key}
        assert {key: held[key] for key in held.keys() - left_out} == {
            key: expected["held"][key] for key in expected["held"].keys() - left_out
        }
        assert plain(result[0][name][1]) == expected["other"]


@pytest.mark.parametrize("name", KEPT)
def test_older_versions_are_consolidated_and_inspected(name, folders, capsys):
    expected = json.loads((folders / name / "values.json").read_text())["held"]
    state = get_fp32_state_dict_from_zero_checkpoint(folders / name)
    parameters = {key for key, _ in Net().named_parameters()}
    for key in parameters & state.keys():
        digest = digests({key: state[key]})[key]
        if f"master/{key}" in expected:
            assert digest == expected[f"master/{key}"]
    assert_states_equal(state["head.weight"], state["embed.weight"])
    assert inspect.main([str(folders / name), "-t", TAG, "--verify", "-p"]) == 0
    assert "blocks.1.rise.weight" in capsys.readouterr().out
