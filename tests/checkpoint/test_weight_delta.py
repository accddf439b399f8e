"""export_delta and apply_delta: bit-equal to a full export, no more bytes than what changed."""

import zlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.rollout import apply_delta
from tests.harness import on_ranks

AXES = [
    {"zero_optimization": {"stage": 0}},
    {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}},
    {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "bf16": {"enabled": True}},
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}},
    {"pipeline": {"stages": 2}},
]
WIDTH = 96


class _Model(nn.Module):
    """Two layers that are trained, one that is frozen, a table of which one row is used, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        self.layers[1].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(self.table(tokens)).float().square().mean()


def _engine(more: dict) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, **more}
    if "pipeline" not in more:
        return deepspeed.initialize(model=_Model(), config=settings)[0]
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    pipeline = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    return deepspeed.initialize(model=pipeline, config={**settings, "gradient_accumulation_steps": 2})[0]


def _train(engine: deepspeed.DeepSpeedEngine) -> None:
    if isinstance(engine.module, PipelineModule):
        engine.train_batch(iter([(torch.randn(2, WIDTH), torch.randn(2, WIDTH))] * 2))
        return
    engine.backward(engine(torch.full((2, 1), 1000)))
    engine.step()


def _changed_bytes(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> int:
    return sum(value.nbytes for name, value in after.items() if not torch.equal(before[name], value))


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: object) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), (what, name)


@on_ranks(1, 2)
def test_a_receiver_has_the_bits_of_a_full_export(rank, ranks) -> None:
    for more in AXES[: None if ranks == 2 else 4]:
        engine = _engine(more)
        received: dict[str, torch.Tensor] = {}
        before: dict[str, torch.Tensor] = {}
        version = None
        for step in range(3):
            if step:
                _train(engine)
            pieces = list(engine.export_delta(since=version if rank == 0 else None))
            full = {name: value.cpu() for name, value in engine.export_weights()}
            assert bool(pieces) == (rank == 0)
            if rank == 0:
                version = apply_delta(received, pieces, version)
                assert version == engine.weight_version
                _assert_equal(received, full, (more, step))
                nbytes, changed = sum(map(len, pieces)), _changed_bytes(before, full) if step else 0
                print(f"{more} {step}: {nbytes} bytes, {changed} changed")
                assert not step or 0 < nbytes <= 1.1 * changed + 4096, (more, nbytes, changed)
                table = full["table.weight"].nbytes if "table.weight" in full else 0
                if step and table:  # of which only the block with the used row is sent
                    assert nbytes < table / 2 + 1.1 * (changed - table) + 4096
            before = full
        versions = [None] * ranks
        dist.all_gather_object(versions, engine.weight_version)
        assert len(set(versions)) == 1
        again = list(engine.export_delta(since=version))
        assert sum(map(len, again)) < 1000  # nothing changed
        engine.destroy()


@on_ranks(2)
def test_what_counts_as_another_version(tmp_path, rank) -> None:
    engine = _engine(AXES[3])
    received: dict[str, torch.Tensor] = {}

    def send(since: str | None) -> str:
        nonlocal received
        pieces = list(engine.export_delta(since=since))
        version = [apply_delta(received, pieces, since) if rank == 0 else None]
        dist.broadcast_object_list(version)
        assert version[0] == engine.weight_version
        full = dict(engine.export_weights())
        _assert_equal(received, full, since)
        return version[0]

    versions = [send(None)]
    assert send(versions[0]) == versions[0]  # nothing has changed
    engine.save_checkpoint(tmp_path)
    with deepspeed.zero.GatheredParameters(engine.module.layers[0].weight, modifier_rank=1):
        engine.module.layers[0].weight.data.add_(rank)
    versions.append(send(versions[-1]))  # the program's own writes
    _train(engine)
    versions.append(send(versions[-1]))
    engine.load_checkpoint(tmp_path)
    versions.append(send(versions[-1]))
    assert len(set(versions)) == 4
    # Of a version that is not the last one all is sent, also to a receiver without weights.
    received = {}
    send(versions[1])
    engine.destroy()


@on_ranks(1)
def test_a_receiver_keeps_its_weights_when_pieces_do_not_fit() -> None:
    engine = _engine(AXES[0])
    received: dict[str, torch.Tensor] = {}
    version = apply_delta(received, engine.export_delta())
    _train(engine)
    pieces = list(engine.export_delta(since=version))
    kept = {name: value.clone() for name, value in received.items()}
    damaged = bytearray(pieces[1])
    damaged[-3] ^= 255
    for wrong, own_version, message in (
        (pieces, "another", "version 'another'.*expected weights of version"),
        (pieces, None, "expected weights of version"),
        (pieces[:-1], version, "expected all pieces"),
        (pieces[1:], version, "expected all pieces"),
        ([], version, "expected all pieces"),
        ([pieces[0], bytes(damaged), *pieces[2:]], version, "damaged"),
        ([b"other", *pieces[1:]], version, "at the beginning; pass what the engine yielded"),
    ):
        with pytest.raises(CheckpointError, match=message.replace("version 'a", "version='a")):
            apply_delta(received, wrong, own_version)
        _assert_equal(received, kept, message)
    other = {**received, "layers.0.weight": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"expected 'layers.0.weight' as float32 \[96, 96\], found"):
        apply_delta(other, pieces, version)
    next(engine.export_delta(since=version))  # which is not walked to its end, so that the next one sends all
    assert len(list(engine.export_delta(since=engine.weight_version))[1]) > len(pieces[1])
    views = {name: value.t().clone().t() if value.dim() == 2 else value.clone() for name, value in kept.items()}
    views["layers.0.weight"] = torch.empty(WIDTH, WIDTH).t().copy_(views["layers.0.weight"])
    assert not views["layers.0.weight"].is_contiguous()
    assert apply_delta(views, pieces, version) == engine.weight_version
    _assert_equal(views, dict(engine.export_weights()), "strided")
    with pytest.raises(DeepSpeedConfigError, match="expected 'zlib' or 'zstd'"):
        next(engine.export_delta(compression="lzma"))


def test_zstd_is_an_extra() -> None:
    pytest.importorskip("zstandard")
    from deepspeed.checkpoint.weight_delta import _COMPRESS, _EXPAND

    data = zlib.compress(b"weights" * 1000)
    assert _EXPAND[b"s"](_COMPRESS["zstd"](data)) == data
