"""The CPU accelerator: facts, random state, memory figures, calls that have no meaning on a CPU."""

import numpy as np
import pytest
import torch

from deepspeed.accelerator import cpu as cpu_module
from deepspeed.accelerator import cpu_has_bf16, host_memory
from deepspeed.accelerator.cpu import _KERNEL_BF16, _KERNEL_FP16, CPUAccelerator, _flags_have
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError

MIB = 1 << 20


@pytest.fixture
def cpu() -> CPUAccelerator:
    return CPUAccelerator()


def test_names_and_counts(cpu):
    assert [cpu.device_name(), cpu.device_name(3), cpu.device_name("3"), cpu.current_device_name()] == ["cpu"] * 4
    assert (cpu.current_device(), cpu.device_count(), cpu.is_available()) == (0, 1, True)
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.visible_devices_envs() == ["CUDA_VISIBLE_DEVICES"]
    assert cpu.get_compile_backend() == "inductor"
    assert cpu.on_accelerator(torch.zeros(1))
    assert not cpu.on_accelerator(torch.zeros(1, device="meta"))
    with cpu.device(0):
        cpu.set_device(0)
        cpu.synchronize()
    assert cpu.is_synchronized_device() and cpu.use_host_timers()
    assert cpu.resolves_data_dependency() and cpu.handles_memory_backpressure()


def test_capabilities_are_bools(cpu):
    assert cpu.is_fp16_supported() is True
    assert cpu.is_bf16_supported() is True
    assert cpu.is_fp64_supported() is True
    assert cpu.is_triton_supported() is False
    assert isinstance(cpu_has_bf16(), bool)
    assert cpu.supported_dtypes() == [torch.float, torch.half, torch.bfloat16]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse\n", True),
        ("flags : fpu amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags : fpu avx512f avx2\nbugs : bf16\n", False),
        ("", False),
    ],
)
def test_bf16_flags(text, expected):
    assert _flags_have(text, _KERNEL_BF16) is expected


def test_fp16_flags():
    assert _flags_have("flags : fpu avx512_fp16\n", _KERNEL_FP16)
    assert not _flags_have("flags : fpu f16c avx512_bf16\n", _KERNEL_FP16), "f16c only converts"


@pytest.mark.parametrize("native", [True, False])
def test_emulation_is_known(cpu, monkeypatch, native):
    monkeypatch.setattr(cpu_module, "cpu_has_fp16", lambda: native)
    monkeypatch.setattr(cpu_module, "cpu_has_bf16", lambda: True)
    assert cpu.emulates(torch.float16) is not native
    assert not cpu.emulates(torch.bfloat16) and not cpu.emulates(torch.float32)


def test_random_state_round_trip(cpu):
    cpu.manual_seed(7)
    assert cpu.initial_seed() == 7
    state = cpu.get_rng_state()
    first = torch.rand(4)
    cpu.set_rng_state(state, 0)
    assert torch.equal(first, torch.rand(4))
    assert cpu.default_generator(0) is torch.default_generator
    assert cpu.random() is torch.random
    cpu.manual_seed_all(8)
    assert cpu.initial_seed() == 8


def test_stream_stand_ins_do_nothing(cpu):
    event = cpu.Event()
    with cpu.stream(cpu.Stream()):
        event.record()
    event.synchronize()
    assert event.query()
    with cpu.stream(None):
        cpu.current_stream().wait_stream(cpu.default_stream())


def test_memory_follows_an_allocation(cpu):
    cpu.empty_cache()
    cpu.reset_peak_memory_stats()
    before = cpu.memory_allocated()
    block = np.ones(64 * MIB, dtype=np.uint8)
    held = cpu.memory_allocated() - before
    assert 60 * MIB <= held <= 80 * MIB
    del block
    assert cpu.memory_allocated() - before < 16 * MIB
    assert cpu.max_memory_allocated() - before >= 60 * MIB
    stats = cpu.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 0
    cpu.reset_max_memory_allocated()
    assert cpu.max_memory_allocated() - before < 32 * MIB
    assert cpu.memory_reserved() > 0 and cpu.memory_cached() > 0
    assert cpu.max_memory_reserved() > 0 and cpu.max_memory_cached() > 0


def test_memory_of_the_machine(cpu):
    assert 0 < cpu.available_memory() < cpu.total_memory()


def test_peak_where_the_kernel_does_not_count(monkeypatch):
    values = iter([10, 30, 20, 20, 25])
    monkeypatch.setattr(host_memory, "_kernel_peak", lambda: None)
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: next(values))
    peak = host_memory.PeakResidentMemory()
    assert [peak.read(), peak.read(), peak.read()] == [10, 30, 30]
    peak.reset()
    assert peak.read() == 25


@pytest.mark.parametrize(
    ("membership", "folder", "files", "expected"),
    [
        (
            "0::/a/b\n",
            "a",
            {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 200"},
            [(1000, 500)],
        ),
        (
            "5:cpu:/\n4:memory:/job\n",
            "memory/job",
            {
                "memory.limit_in_bytes": "4096",
                "memory.usage_in_bytes": "96",
                "memory.stat": "total_inactive_file 0",
            },
            [(4096, 96)],
        ),
        ("0::/a\n", "a", {"memory.max": "max", "memory.current": "1", "memory.stat": "anon 1"}, []),
        # Seen from inside a container: the path is the host's, the limit stands at the root.
        ("0::/host/path\n", "", {"memory.max": "50", "memory.current": "20", "memory.stat": "anon 1"}, [(50, 20)]),
    ],
)
def test_container_limits(tmp_path, membership, folder, files, expected):
    (tmp_path / "self").write_text(membership)
    group = tmp_path / "fs" / folder
    group.mkdir(parents=True)
    for name, text in files.items():
        (group / name).write_text(text)
    assert host_memory._cgroup_limits(tmp_path / "fs", tmp_path / "self") == expected


def test_container_limit_counts_as_the_memory_of_the_machine(monkeypatch):
    monkeypatch.setattr(host_memory, "_cgroup_limits", lambda: [(64 * MIB, 60 * MIB)])
    assert host_memory.total_bytes() == 64 * MIB
    assert host_memory.available_bytes() == 4 * MIB


def test_host_memory_calls(cpu):
    tensor = torch.arange(6.0).reshape(2, 3)
    assert cpu.pin_memory(tensor) is tensor
    assert cpu.pin_memory(tensor, match_shape=False).shape == (6,)
    assert cpu.pin_memory(tensor, make_copy=False).shape == (2, 3)
    assert cpu.pin_empty(2, 3, dtype=torch.half).shape == (2, 3)
    assert cpu.pin_empty((2, 3)).dtype == torch.float32
    assert cpu.pin_empty_like(tensor.bfloat16()).dtype == torch.bfloat16
    assert cpu.is_pinned(tensor) is False
    assert cpu.unpin_memory(tensor) is False
    with pytest.raises(ValueError, match="leave device at 'cpu'"):
        cpu.pin_empty(2, device="meta")


def test_typed_constructors(cpu):
    names = ("Float", "Half", "BFloat16", "Double", "Int", "Long", "Byte")
    dtypes = (torch.float, torch.half, torch.bfloat16, torch.double, torch.int, torch.long, torch.uint8)
    for name, dtype in zip(names, dtypes, strict=True):
        tensor = getattr(cpu, f"{name}Tensor")([1, 2])
        assert (tensor.dtype, tensor.device.type, tensor.tolist()) == (dtype, "cpu", [1, 2])


@pytest.mark.parametrize(
    "call",
    [
        lambda cpu: cpu.build_extension(),
        lambda cpu: cpu.create_graph(),
        lambda cpu: cpu.capture_to_graph(None),
        lambda cpu: cpu.replay_graph(None),
    ],
)
def test_what_does_not_exist_raises_with_one_sentence(cpu, call):
    with pytest.raises(NotYetSupportedError) as raised:
        call(cpu)
    assert "\n" not in str(raised.value) and "; " in str(raised.value)


def test_profiler_ranges_and_lazy_calls(cpu):
    called = []
    cpu.lazy_call(lambda: called.append(1))
    assert called == [1]
    cpu.range_push("step", domain="d")
    cpu.range_pop()


def test_visible_devices_are_written(cpu):
    environment = {}
    cpu.set_visible_devices_envs(environment, [0, 2])
    assert environment == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert cpu.export_envs() == []


def test_compile_backend(cpu):
    cpu.set_compile_backend("eager")
    assert cpu.get_compile_backend() == "eager"
    with pytest.raises(DeepSpeedConfigError, match="no such backend.*eager"):
        cpu.set_compile_backend("warp-drive")
    assert cpu.get_compile_backend() == "eager"
