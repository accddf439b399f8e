"""What programs import from the inside of upstream computes what they count on."""

import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError, OffloadError
from tests.harness import on_ranks, run_ranks
from tests.parallel.tensor.support import llama

FIXTURES = Path(__file__).resolve().parents[1] / "checkpoint" / "fixtures"


# -- tensors that ranks hold in parts ----------------------------------------------------------------------------------


def _parts_of_tensors():
    from deepspeed.runtime.utils import PartitionedTensor

    size = dist.get_world_size()
    for shape in ((7, 1), (2, 3, 4), (1,), (5,)):
        whole = torch.arange(torch.Size(shape).numel()).view(shape) + 1
        for value in (whole.double(), whole, whole > 3):
            part = PartitionedTensor(value, group=None)
            assert part.data().dim() == 1 and part.data().shape == part.local_size()
            assert part.full_size() == list(shape) and torch.equal(part.full(), value)
            meta = part.to_meta()
            expected = [len(shape), *shape, size, dist.get_rank(), *part.partition]
            assert meta.dtype == torch.long and meta.tolist() == expected
            received = PartitionedTensor.from_meta(meta, part.data(), None, device="cpu")
            assert torch.equal(received.full(), value)
            wrong = meta.clone()
            wrong[len(shape) + 1] += 1
            with pytest.raises(DeepSpeedConfigError, match="from_meta: expected part"):
                PartitionedTensor.from_meta(wrong, part.data(), None)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tensors_in_parts(size):
    run_ranks(_parts_of_tensors, size)


@on_ranks(2)
def test_flat_buffers_gathered_by_a_program() -> None:
    from deepspeed.runtime.utils import all_gather_dp_groups

    rank, size = dist.get_rank(), dist.get_world_size()
    flats = [torch.zeros(4 * size), torch.zeros(2 * size, dtype=torch.bfloat16)]
    parts = [list(flat.chunk(size)) for flat in flats]
    for own in parts:
        own[rank].fill_(rank + 1)
    all_gather_dp_groups(flats, parts, [None, None], start_alignment_factor=2, allgather_bucket_size=100)
    for flat in flats:
        assert flat.view(size, -1)[:, 0].tolist() == list(range(1, size + 1))


def _weights_for_another_program(stage: int):
    from deepspeed.module_inject.layers import GatherReplacedLayerParams
    from deepspeed.runtime.utils import is_model_parallel_parameter

    torch.manual_seed(0)
    model = llama()
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    cut = 0
    for name, parameter in engine.module.named_parameters():
        before = parameter.data.shape if stage < 3 else None
        cut += is_model_parallel_parameter(parameter)
        with GatherReplacedLayerParams([parameter], model, enabled=True):
            assert torch.equal(parameter.data, expected[name]), name
        assert before is None or parameter.data.shape == before
        with GatherReplacedLayerParams(parameter, model, enabled=False):
            assert before is None or parameter.data.shape == before
    assert cut > 4
    loss = engine(input_ids=torch.ones(2, 5, dtype=torch.long), labels=torch.ones(2, 5, dtype=torch.long)).loss
    engine.backward(loss)
    engine.step()


@pytest.mark.parametrize(("stage", "size"), [(0, 2), (1, 4), (3, 4)])
def test_parameters_whole_over_tensor_ranks(stage, size):
    run_ranks(_weights_for_another_program, size, stage)


# -- files -------------------------------------------------------------------------------------------------------------


def test_tensors_to_and_from_files(tmp_path):
    from deepspeed.ops.aio import AsyncIOBuilder

    operator = AsyncIOBuilder().load()
    handle = operator.aio_handle(block_size=1000, queue_depth=3, intra_op_parallelism=2)
    settings = (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism())
    assert settings == (1000, 3, 2) and not handle.get_single_submit()
    buffer = handle.new_cpu_locked_tensor(5000, torch.empty(0, dtype=torch.int16))
    buffer.copy_(torch.arange(5000))
    file = str(tmp_path / "values")
    assert handle.sync_pwrite(buffer, file) == 1
    read = torch.zeros(4000, dtype=torch.int16)
    handle.async_pread(read[:2000], file, 2000)
    handle.async_pread(read[2000:], file, 6000)
    assert handle.wait() == 2 and torch.equal(read, buffer[1000:])
    assert handle.free_cpu_locked_tensor(buffer) and not handle.free_cpu_locked_tensor(read)
    with pytest.raises(OffloadError, match="expected 1000 bytes from 10000 on, found the end of the file"):
        handle.sync_pread(read, file, 4000)
    with pytest.raises(OffloadError, match="cannot be opened"):
        handle.sync_pread(read, str(tmp_path / "missing"))
    with pytest.raises(OffloadError, match="contiguous tensor in host memory"):
        handle.sync_pwrite(read.view(40, 100).T, file)
    again = torch.zeros(10)
    assert operator.aio_write(torch.arange(10.0), file) == operator.aio_read(again, file) == 0
    assert torch.equal(again, torch.arange(10.0))


@pytest.mark.parametrize(("fixture", "stage", "size"), [("2-stage2-bf16", 2, 2), ("2-stage3-fp16", 3, 2)])
def test_optimizer_files_read_by_a_program(tmp_path, fixture, stage, size):
    from deepspeed.utils.zero_to_fp32 import get_optim_files, parse_optim_states

    with zipfile.ZipFile(FIXTURES / f"{fixture}.zip") as archive:
        archive.extractall(tmp_path)
    folder = str(next(tmp_path.rglob("*_optim_states.pt")).parent)
    found, ranks, flat = parse_optim_states(get_optim_files(folder), folder)
    assert (found, ranks, len(flat)) == (stage, size, size)
    values = flat if stage == 3 else flat[0]
    assert all(value.dtype == torch.float32 and value.dim() == 1 for value in values)


def test_names_of_files_of_upstream():
    from deepspeed.checkpoint import (
        get_layer_ckpt_name_for_rank,
        get_model_ckpt_name_for_rank,
        get_zero_ckpt_name_for_rank,
    )

    assert get_layer_ckpt_name_for_rank("d", "layer_03", 1) == "d/layer_03-model_01_model_states.pt"
    assert get_model_ckpt_name_for_rank("d", "01") == "d/mp_rank_01_model_states.pt"
    assert get_zero_ckpt_name_for_rank("d", 2, 3) == "d/zero_pp_rank_2_mp_rank_03_optim_states.pt"


def test_universal_information_as_megatron_states_it(tmp_path):
    from deepspeed.checkpoint import SubparamShape
    from deepspeed.checkpoint import constants as c
    from deepspeed.checkpoint.upstream.files import load

    information = {
        c.UNIVERSAL_CHECKPOINT_VERSION_KEY: c.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        c.VOCABULARY_PARAMETER_PATTERNS: [r"tied_modules.embed.word_embeddings.weight"],
        c.PARAMETER_WITH_SUB_PARAMS: [vars(SubparamShape(["qkv"], ((4, 2, 2), 8), 0))],
        c.ORIGINAL_VOCAB_SIZE: 50257,
    }
    assert information["universal_checkpoint_version"] == 0.4
    torch.save({c.UNIVERSAL_CHECKPOINT_INFO: information, "one": SubparamShape(["a"], (1,), 0)}, tmp_path / "file")
    found = load(tmp_path / "file", trust=False)
    assert found["universal_checkpoint_info"] == information and found["one"].partition_dim == 0


# -- small things ------------------------------------------------------------------------------------------------------


def test_random_states_under_the_names_of_programs():
    from deepspeed.runtime.activation_checkpointing import checkpointing as random

    assert random.get_cuda_rng_tracker() is random._CUDA_RNG_STATE_TRACKER
    random.model_parallel_cuda_manual_seed(5)
    assert list(random._CUDA_RNG_STATE_TRACKER.get_states()) == [random._MODEL_PARALLEL_RNG_TRACKER_NAME]
    state = torch.get_rng_state()
    drawn = torch.rand(3)
    random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    random._CUDA_RNG_STATE_TRACKER.reset()


def test_lines_on_standard_output(capsys, monkeypatch):
    from deepspeed.utils.logging import print_dist, should_log_le

    monkeypatch.setenv("RANK", "1")
    print_dist("everywhere")
    print_dist("here", ranks=[1])
    print_dist("elsewhere", ranks=[0])
    assert capsys.readouterr().out == "everywhere\nhere\n"
    assert should_log_le("critical") and not should_log_le("debug")


def test_operator_on_lists_of_tensors():
    from deepspeed.ops.adam.multi_tensor_apply import MultiTensorApply
    from deepspeed.ops.op_builder.builder import OpBuilder

    assert MultiTensorApply(4)(lambda *given: given, "flag", [[1]], 2) == (4, "flag", [[1]], 2)
    assert OpBuilder.is_rocm_pytorch() == (torch.version.hip is not None)


def _one_engine(stage: int = 0, **sections):
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **sections}
    return deepspeed.initialize(model=nn.Linear(2, 2), config={**config, "zero_optimization": {"stage": stage}})[0]


@on_ranks(1)
def test_timers_and_autocast_of_an_engine() -> None:
    from deepspeed.runtime.engine import autocast_if_enabled
    from deepspeed.utils.timer import BACKWARD_INNER_MICRO_TIMER, BACKWARD_MICRO_TIMER, FORWARD_MICRO_TIMER

    engine = _one_engine(wall_clock_breakdown=True, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    engine.backward(engine(torch.ones(1, 2)).float().sum())
    assert engine.timers(BACKWARD_MICRO_TIMER) is engine.timers("backward")
    assert engine.timers(FORWARD_MICRO_TIMER).elapsed(reset=False) > 0
    with pytest.raises(NotYetSupportedError, match="have no timers of their own"):
        engine.timers(BACKWARD_INNER_MICRO_TIMER)
    with autocast_if_enabled(engine):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with autocast_if_enabled(_one_engine()):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def _version_line() -> str:
    lines: list[str] = []
    deepspeed.utils.logger.addFilter(lambda record: lines.append(record.getMessage()) or True)
    _one_engine()
    deepspeed.utils.logger.filters.clear()
    return lines[0]


def test_first_line_of_an_engine_has_the_version():
    (line,) = run_ranks(_version_line, 1, fresh=True)
    assert line.startswith(f"DeepSpeed info: version={deepspeed.__version__}, git-hash=")
    assert line.endswith(f"path={Path(deepspeed.__file__).parent}")


@on_ranks(2)
def test_backend_as_an_object() -> None:
    from deepspeed.comm.torch import TorchBackend

    backend = TorchBackend("gloo", timeout=None, init_method=None)
    total = torch.ones(2)
    backend.all_reduce(total)
    assert total.tolist() == [2, 2] and backend.get_world_size() == 2
    assert TorchBackend.get_all_gather_function() is torch.distributed.all_gather_into_tensor
    with pytest.raises(AttributeError, match="deepspeed.comm lists the functions"):
        _ = backend.no_such_function


def test_placeholders_of_modules():
    from deepspeed.compile.passes import zero3_compile

    with pytest.raises(NotYetSupportedError, match=r"compile.passes.zero3_compile: DeepCompile is not supported yet"):
        getattr(zero3_compile, "add_z3_gather_release")()  # noqa: B009
    with pytest.raises(NotYetSupportedError, match="DeepCompile"):
        zero3_compile()
    assert not hasattr(zero3_compile, "anything")
