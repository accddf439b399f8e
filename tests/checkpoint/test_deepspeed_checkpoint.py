"""DeepSpeedCheckpoint on folders of the original package, plain and of pipelines, and on one of this package."""

import zipfile
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint import DeepSpeedCheckpoint
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.checkpoint.upstream.files import load
from deepspeed.errors import CheckpointError
from tests.checkpoint.training import engine, train
from tests.harness import run_ranks

FIXTURES = Path(__file__).resolve().parent / "fixtures"


class Arguments:
    """As Megatron saves its own."""


def replace(path: Path, state) -> None:
    """Saves beside the file first, since tensors of ``state`` are mapped from it."""
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.fixture
def unpack(tmp_path):
    def unpacked(name: str) -> Path:
        with zipfile.ZipFile(FIXTURES / f"{name}.zip") as archive:
            archive.extractall(tmp_path / name)
        return tmp_path / name / "tag"

    return unpacked


def test_a_pipeline(unpack):
    folder = unpack("pipe2x2-stage1-fp32")
    found = DeepSpeedCheckpoint(folder)
    assert (found.tp_degree, found.pp_degree, found.dp_degree, found.world_size) == (1, 2, 2, 4)
    assert found.layer_keys == [f"layer_{number:02d}" for number in range(4)]
    assert [Path(path).name for path in found.mp_rank_files] == [f"mp_rank_0{n}_model_states.pt" for n in (0, 1)]
    assert found.get_iteration() == 3 and found.get_args() is None and found.global_state["note"] == "hello"
    assert found.get_pp_transformer_map(0) == ["layer_01"] and found.get_pp_transformer_map(1) == ["layer_02"]
    assert not found.is_change_pp_degree() and not found.is_change_tp_degree()
    weights = get_fp32_state_dict_from_zero_checkpoint(folder.parent, "tag")
    assert torch.equal(found.get_embedding_state(0)["weight"], weights["tied_modules.embed.weight"])
    assert found.get_final_norm_files(0) == [str(folder / "layer_03-model_states.pt")]
    one = DeepSpeedCheckpoint(folder, pp_degree=1)
    layers = one.get_transformer_state(0, 0)
    assert one.is_change_pp_degree() and len(layers) == 2
    for number, layer in zip((1, 2), layers, strict=True):
        for name, value in layer.items():
            assert torch.equal(value, weights[f"{number}.{name}"])
    masters = [
        found.get_zero_checkpoint_state(0, 0, rank)["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
        for rank in range(2)
    ]
    trained = [weights["tied_modules.embed.weight"], *(v for k, v in layers[0].items() if k not in ("frozen", "mean"))]
    assert torch.equal(torch.cat(masters)[: 88 + 8], torch.cat([v.flatten() for v in trained])[: 88 + 8])
    for call, message in (
        (lambda: DeepSpeedCheckpoint(folder, tp_degree=2), r"tp_degree=2\): expected 1.*engine\.load_checkpoint"),
        (
            lambda: DeepSpeedCheckpoint(folder, pp_degree=4).get_transformer_state(0, 0),
            "pp_degree=4: expected at most 2",
        ),
        (lambda: found.get_2d_parallel_state(0, 2), "pp_index=2, expected 0 to 1"),
        (lambda: found.get_zero_files(0, 0, 2), "dp_index=2, expected 0 to 1"),
    ):
        with pytest.raises(CheckpointError, match=message):
            call()
    found.validate_files()
    (folder / "layer_02-model_states.pt").unlink()  # it is mapped
    (folder / "layer_02-model_states.pt").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"layer_02-model_states\.pt cannot be read"):
        found.validate_files()


def test_a_folder_of_zero_ranks(unpack):
    folder = unpack("2-stage2-bf16")
    path = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = load(path)
    inner = state["optimizer_state_dict"]
    inner["group_paddings"] = [3, 0]
    for name in ("exp_avg", "exp_avg_sq"):
        moments = inner["base_optimizer_state"]["state"][0]
        moments[name] = torch.cat([moments[name], torch.zeros(3)])
    del inner["loss_scaler"], inner["zero_stage"], inner["param_slice_mappings"]  # of classes that files cannot name
    replace(path, state)
    found = DeepSpeedCheckpoint(folder.parent)  # `latest` names the tag
    assert found.dir == str(folder) and (found.tp_degree, found.pp_degree, found.dp_degree) == (1, 1, 2)
    lengths = []
    for strip in (False, True):
        inner = found.get_zero_checkpoint_state(0, 0, 1, strip_tensor_paddings=strip)["optimizer_state_dict"]
        masters = inner["single_partition_of_fp32_groups"]
        lengths.append([inner["base_optimizer_state"]["state"][g]["exp_avg"].numel() for g in range(len(masters))])
    assert lengths[1] == [values.numel() for values in masters]
    assert lengths[0] == [lengths[1][0] + 3, lengths[1][1]]
    state = found.get_2d_parallel_state(0, 0)
    assert state["module"]["embed.weight"].dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match=r"expected files layer_NN-model_states\.pt of a pipeline, found 0"):
        found.get_embedding_state(0)


def test_objects_of_the_caller_need_trust(unpack):
    folder = unpack("pipe2-stage0-fp32")
    path = folder / "mp_rank_00_model_states.pt"
    state = load(path)
    replace(path, {**state, "args": Arguments(), "iteration": 70, "checkpoint_info": {"version": 1}})
    with pytest.raises(CheckpointError, match="allow_pickled_objects=True"):
        DeepSpeedCheckpoint(folder)
    found = DeepSpeedCheckpoint(folder, allow_pickled_objects=True)
    assert isinstance(found.get_args(), Arguments) and found.get_iteration() == 70
    assert found.get_checkpoint_info() == {"version": 1}


def _save(folder):
    run = engine(2, "fp32")
    train(run, range(2))
    run.save_checkpoint(folder, client_state={"iteration": 5})


def test_a_folder_of_this_package(tmp_path):
    run_ranks(_save, 2, str(tmp_path))
    found = DeepSpeedCheckpoint(tmp_path)
    assert found.get_iteration() == 5 and found.dp_degree == 2 and found.global_state["global_steps"] == 2
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    module = found.get_2d_parallel_state(0, 0)["module"]
    assert module.keys() == weights.keys() and all(torch.equal(module[name], weights[name]) for name in weights)
    found.validate_files()
    with pytest.raises(CheckpointError, match=r"has no files of layers; take the weights of get_2d_parallel_state"):
        found.get_embedding_state(0)
    with pytest.raises(CheckpointError, match="no files of ZeRO ranks; use engine.load_checkpoint"):
        found.get_zero_checkpoint_state(0, 0, 0)
