"""Models that are read with the experts of this rank only: values, losses, and how much is held meanwhile."""

import gc
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed
from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.parallel.expert import loading
from deepspeed.parallel.expert.loading import from_pretrained
from deepspeed.zero.address import full_shape
from tests.engine.support import rank
from tests.harness import run_ranks
from tests.parallel.expert.models import batch, build
from tests.parallel.expert.test_auto import config, of_this_rank

WIDE = {"num_hidden_layers": 4, "hidden_size": 64, "head_dim": 32}


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that were made inside and are alive, and the most there were at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0
        self.read = 0

    def take(self, found: Any) -> None:
        if isinstance(found, torch.Tensor) and found.device.type == "cpu":
            storage = found.untyped_storage()
            self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        elif isinstance(found, (tuple, list)):
            for one in found:
                self.take(one)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.take(found)
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._alive.values()))
        return found


def _saved(folder: Path, kinds: list[str]) -> None:
    for kind in kinds:
        build(kind, **(_wide(kind))).save_pretrained(folder / kind, max_shard_size="60KB")


def _wide(kind: str) -> dict[str, Any]:
    return {**WIDE, "intermediate_size": 96, "num_local_experts": 8} if kind == "mixtral" else {}


def _loaded(folder: str, cells: list[tuple[str, int]]) -> None:
    for kind, stage in cells:
        settings = config(stage)
        whole = build(kind, **_wide(kind))
        sizes = {name: parameter.nbytes for name, parameter in whole.named_parameters()}
        with Peak() as peak:
            usual = loading.read_rows

            def counted(found: Any, rows: slice, peak: Peak = peak, usual: Any = usual) -> torch.Tensor:
                part = usual(found, rows)
                peak.read += part.nbytes
                peak.take(part)
                return part

            loading.read_rows = counted
            try:
                gc.collect()
                model = from_pretrained(Path(folder, kind), settings)
            finally:
                loading.read_rows = usual
        what = f"{kind}, stage {stage}"
        share = wanted = 0
        for name, parameter in model.named_parameters():
            expected = of_this_rank(
                parameter,
                dict(whole.named_parameters())[name].detach(),
                2,
                experts=4 if kind == "longcat_flash" else None,
            )
            assert tuple(full_shape(parameter)) == tuple(expected.shape), f"{what}: {name}"
            assert stage == 3 or torch.equal(parameter, expected), f"{what}: {name}"
            wanted += expected.nbytes
            is_whole_here = stage < 3 or not getattr(parameter, "allreduce", True)  # nobody else has these experts
            share += math.prod(full_shape(parameter)) * 4 // (1 if is_whole_here else 2)
        layers = [sum(n for name, n in sizes.items() if f"layers.{number}." in name) for number in range(2)]
        assert peak.read <= 1.02 * wanted, f"{what}: {peak.read} bytes read, {wanted} are of this rank"
        if kind == "mixtral":
            assert peak.most <= share + max(layers), f"{what}: {peak.most} held, {share} are mine, a layer {layers}"
            assert peak.most < sum(sizes.values()) * 0.85, what
        engine = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings
        )[0]
        engine.eval()
        with torch.no_grad():
            found = engine(**batch(0, rank())).loss
            assert found.item() == pytest.approx(whole(**batch(0, rank())).loss.item(), abs=1e-5), what
        engine.destroy()
    with pytest.raises(DeepSpeedConfigError, match="autoep_size 1: .* are spread over 2 ranks already"):
        deepspeed.initialize(
            model=from_pretrained(Path(folder, "mixtral"), config(1)),
            config={**config(1, 1), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        )
    with pytest.raises(DeepSpeedConfigError, match="no enabled expert_parallel section"):
        from_pretrained(Path(folder, "mixtral"), {"train_micro_batch_size_per_gpu": 1})
    with pytest.raises(CheckpointError, match=r"weights of MixtralForCausalLM are in none of the 1 files"):
        from_pretrained(Path(folder, "torn"), config(1))
    with pytest.raises(CheckpointError, match="has shape .* with the config.json of these weights"):
        from_pretrained(Path(folder, "other"), config(1))


CELLS = [("mixtral", 1), ("mixtral", 3), ("gpt_oss", 2)]
MORE = [("mixtral", 0), ("qwen2_moe", 0), ("deepseek_v3", 1), ("llama4", 1), ("olmoe", 3), ("longcat_flash", 3)]


@pytest.mark.slow
def test_more_kinds_are_read_so(tmp_path: Path) -> None:
    _check(tmp_path, MORE)


def test_each_rank_reads_its_experts_only(tmp_path: Path) -> None:
    _check(tmp_path, CELLS)


def _check(tmp_path: Path, cells: list[tuple[str, int]]) -> None:
    _saved(tmp_path, sorted({kind for kind, _ in cells}))
    for name in ("torn", "other"):
        (tmp_path / name).mkdir()
        build("mixtral").save_pretrained(tmp_path / name)
    weights = load_file(tmp_path / "torn" / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "norm" not in k}, tmp_path / "torn" / "model.safetensors")
    written = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**written, "hidden_size": 32}))
    run_ranks(_loaded, 2, str(tmp_path), cells, timeout=200)


def _correction_biases(model: Any) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}


def _keep_biases(folder: str) -> None:
    written = load_file(Path(folder, "model.safetensors"))
    for stage, types in ((1, {}), (3, {}), (2, {"keep_in_fp32_modules": "auto", "buffer_dtype": "bf16"})):
        settings = {**config(stage), "bf16": {"enabled": True}, "data_types": types}
        model = from_pretrained(folder, settings, dtype=torch.bfloat16)
        engine = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings
        )[0]
        found = _correction_biases(engine.module)
        assert found
        for name, bias in found.items():
            assert bias.dtype == torch.float32 and torch.equal(bias, written[name]), f"stage {stage}: {name}"
        engine.backward(engine(**batch(0, rank())).loss)
        engine.step()
        engine.destroy()


def test_what_a_family_keeps_in_fp32_stays_so_with_experts_over_ranks(tmp_path: Path) -> None:
    model = build("deepseek_v3")
    for bias in _correction_biases(model).values():
        bias.copy_(torch.rand(bias.shape, generator=torch.Generator().manual_seed(1)) / 100)
    model.save_pretrained(tmp_path)
    run_ranks(_keep_biases, 2, str(tmp_path))


class _Table(torch.nn.Module):
    """Has a buffer that its model's initializer computes, and no config."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 7.0))
        self.register_buffer("table", torch.arange(3.0, device="meta"), persistent=False)


class _Tower(torch.nn.Module):
    def __init__(self, sets_table: bool) -> None:
        super().__init__()
        self.positions = _Table()
        self.sets_table = sets_table

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, _Table) and self.sets_table:
            module.table.copy_(torch.arange(3.0))


def test_buffers_that_no_file_has_come_from_the_initializer():
    model = torch.nn.ModuleDict({"tower": _Tower(True)})
    loading._make_buffers(model)
    assert model["tower"].positions.table.tolist() == [0.0, 1.0, 2.0]
    assert model["tower"].positions.weight.tolist() == [7.0, 7.0]
    with pytest.raises(
        CheckpointError, match="table of 'tower.positions' ._Table. are in no file.*_init_weights does not"
    ):
        loading._make_buffers(torch.nn.ModuleDict({"tower": _Tower(False)}))
