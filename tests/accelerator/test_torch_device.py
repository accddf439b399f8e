"""The CUDA accelerator on a real GPU."""

import pytest
import torch

from deepspeed.accelerator.torch_device import CUDAAccelerator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA GPU")]

MIB = 1 << 20


@pytest.fixture
def gpu() -> CUDAAccelerator:
    return CUDAAccelerator()


def test_device(gpu):
    gpu.set_device(0)
    assert gpu.current_device_name() == "cuda:0"
    with gpu.device(0):
        tensor = gpu.FloatTensor([1.0, 2.0])
    assert gpu.on_accelerator(tensor) and not gpu.on_accelerator(tensor.cpu())
    gpu.synchronize()
    assert gpu.supported_dtypes() == [torch.float, torch.half, torch.bfloat16]


def test_random_state_round_trip(gpu):
    gpu.manual_seed_all(3)
    state = gpu.get_rng_state(0)
    first = torch.rand(4, device="cuda")
    gpu.set_rng_state(state, 0)
    assert torch.equal(first, torch.rand(4, device="cuda"))
    assert gpu.default_generator(0).device.type == "cuda"


def test_memory(gpu):
    gpu.empty_cache()
    gpu.reset_peak_memory_stats()
    before = gpu.memory_allocated()
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert gpu.memory_allocated() - before == 64 * MIB
    del block
    assert gpu.max_memory_allocated() - before == 64 * MIB
    assert 0 < gpu.available_memory() <= gpu.total_memory()
    assert gpu.memory_stats()["allocated_bytes.all.peak"] == gpu.max_memory_allocated()


def test_pinned_memory(gpu):
    tensor = torch.arange(6.0).reshape(2, 3)
    pinned = gpu.pin_memory(tensor)
    assert gpu.is_pinned(pinned) and not gpu.is_pinned(tensor) and torch.equal(pinned, tensor)
    assert gpu.pin_memory(tensor, make_copy=False, match_shape=False).shape == (6,)
    assert gpu.is_pinned(gpu.pin_empty_like(tensor))


def test_streams_and_graphs(gpu):
    side = gpu.Stream()
    with gpu.stream(side):
        total = torch.ones(8, device="cuda").sum()
        event = gpu.Event()
        event.record()
    event.synchronize()
    assert total.item() == 8
    source = torch.ones(4, device="cuda")
    graph = gpu.create_graph()
    with gpu.capture_to_graph(graph):
        doubled = source * 2
    source.fill_(5)
    gpu.replay_graph(graph)
    assert doubled.tolist() == [10.0] * 4
