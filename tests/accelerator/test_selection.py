"""Which accelerator a process gets, and that choosing or importing one starts nothing."""

import subprocess
import sys
from inspect import getsource, isfunction
from types import SimpleNamespace

import pytest
import torch

from deepspeed.accelerator import (
    DeepSpeedAccelerator,
    get_accelerator,
    is_current_accelerator_supported,
    selection,
    set_accelerator,
)
from deepspeed.accelerator.cpu import CPUAccelerator
from deepspeed.accelerator.torch_device import CUDAAccelerator, MPSAccelerator, TorchDeviceAccelerator
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch):
    monkeypatch.setattr(selection, "_current", None)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)


def see(monkeypatch, cuda_devices, other):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda_devices)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: other)


def test_the_environment_chooses_and_the_object_stays(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "CPU")
    chosen = get_accelerator()
    assert isinstance(chosen, CPUAccelerator)
    assert get_accelerator() is chosen
    assert is_current_accelerator_supported() is True


def test_unknown_name_in_the_environment(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cudaa")
    with pytest.raises(DeepSpeedConfigError, match="expected one of cuda.*klxpu; use 'cuda'"):
        get_accelerator()


@pytest.mark.parametrize("name", ["cuda", "npu", "xpu", "mps"])
def test_a_device_that_torch_does_not_see(monkeypatch, name):
    see(monkeypatch, 0, None)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setenv("DS_ACCELERATOR", name)
    with pytest.raises(DeepSpeedConfigError, match=f"sees no {name} device"):
        get_accelerator()


@pytest.mark.parametrize(
    ("cuda_devices", "other", "kind", "name", "backend", "variables"),
    [
        (2, torch.device("cuda"), CUDAAccelerator, "cuda", "nccl", ["CUDA_VISIBLE_DEVICES"]),
        (0, torch.device("xpu"), TorchDeviceAccelerator, "xpu", "xccl", ["ZE_AFFINITY_MASK"]),
        (0, torch.device("mps"), MPSAccelerator, "mps", "gloo", []),
        (0, None, CPUAccelerator, "cpu", "gloo", ["CUDA_VISIBLE_DEVICES"]),
    ],
)
def test_detection(monkeypatch, cuda_devices, other, kind, name, backend, variables):
    see(monkeypatch, cuda_devices, other)
    chosen = get_accelerator()
    assert type(chosen) is kind
    assert (chosen.device_name(), chosen.communication_backend_name()) == (name, backend)
    assert chosen.visible_devices_envs() == variables


def test_indexed_names_take_numbers_and_their_text(monkeypatch):
    see(monkeypatch, 2, torch.device("cuda"))
    assert get_accelerator().device_name(1) == get_accelerator().device_name("1") == "cuda:1"
    assert get_accelerator().export_envs() == ["NCCL"]


def test_set_accelerator(monkeypatch):
    mine = CPUAccelerator()
    set_accelerator(mine)
    assert get_accelerator() is mine
    with pytest.raises(TypeError, match="expected a DeepSpeedAccelerator, found str"):
        set_accelerator("cpu")


@pytest.mark.parametrize("kind", [CPUAccelerator, MPSAccelerator])
def test_kinds_unlike_cuda_override_what_calls_its_functions(kind):
    members = {name: getattr(value, "fget", value) for name, value in vars(DeepSpeedAccelerator).items()}
    calls = [name for name, value in members.items() if isfunction(value) and "self._call(" in getsource(value)]
    assert len(calls) > 20
    assert [name for name in calls if getattr(kind, name) is getattr(DeepSpeedAccelerator, name)] == []


def test_a_module_without_a_function_raises(monkeypatch):
    class Module:
        @staticmethod
        def mem_get_info(index):
            return 30, 100

        @staticmethod
        def memory_reserved(index):
            return 20

        @staticmethod
        def memory_allocated(index):
            return 5

    monkeypatch.setattr(torch, "get_device_module", lambda name: Module)
    device = TorchDeviceAccelerator("npu")
    assert (device.total_memory(), device.available_memory()) == (100, 45)
    with pytest.raises(NotYetSupportedError, match=r"torch.npu of torch .* has no empty_cache\(\)"):
        device.empty_cache()


def test_choosing_prints_one_line_and_starts_no_context():
    script = (
        "import torch; import deepspeed.accelerator as a; "
        "assert a.selection._current is None; "
        "a.get_accelerator(); a.get_accelerator(); "
        "assert not torch.cuda.is_initialized() and not torch.xpu.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    if torch.accelerator.is_available():
        assert done.stderr == ""
    else:
        assert done.stderr.count("\n") == 1 and "using the CPU" in done.stderr


@pytest.mark.parametrize("native", [True, False])
def test_cuda_distinguishes_emulated_bf16_from_native(monkeypatch, native):
    """Volta computes bf16 without instructions for it; torch calls that supported."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    gpu = CUDAAccelerator()
    assert gpu.is_bf16_supported() and gpu.emulates(torch.bfloat16) is not native
    assert not gpu.emulates(torch.float16) and not gpu.emulates(torch.float32)


@pytest.mark.parametrize(
    ("index", "given"), [(None, 3), (1, 1), ("1", 1), ("cuda:1", "cuda:1"), (torch.device("cuda:1"),) * 2]
)
def test_memory_of_devices_as_torch_names_them(monkeypatch, index, given):
    seen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda where: seen.append(where) or SimpleNamespace(total_memory=7)
    )
    assert CUDAAccelerator().total_memory(index) == 7 and seen == [given]
