"""Experts spread over the ranks that see other samples, layers over the stages of a pipeline: two by two.

And two by two by two: the rest of each stage cut over tensor-parallel ranks besides.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import get_rank

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.moe.layer import MoE
from deepspeed.parallel.pipe.transformers_models import transformers_names
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from tests.engine.support import SHARDED
from tests.harness import run_ranks
from tests.harness.training import Expected, plain_run
from tests.parallel.expert.models import batch, build
from tests.parallel.expert.test_auto import ADAMW, STEPS, adamw

WIDTH, EXPERTS, COUNT, COPIES = 6, 4, 3, 2


class Begin(nn.Module):
    """A linear; the balance losses begin at 0 and travel along."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), x.new_zeros(())


class Mixed(nn.Module):
    """Experts, whose balance loss is added to what came."""

    def __init__(self, ep_size: int, number: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.moe = MoE(WIDTH, expert, EXPERTS, ep_size, k=2, top2_2nd_expert_sampling=False)
        layer = self.moe.deepspeed_moe
        place = get_rank() % COPIES if ep_size > 1 else 0
        with torch.no_grad():
            for local, one in enumerate(layer.experts.deepspeed_experts):
                draws = torch.Generator().manual_seed(100 * number + place * layer.num_local_experts + local)
                for parameter in one.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.2)

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, balance = value
        made, l_aux, _ = self.moe(x)
        return x + made, balance + l_aux


class End(nn.Module):
    """A last linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(value[0]), value[1]


def loss_fn(value: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    return (value[0].float() - labels).square().mean() + 0.1 * value[1]


def layers(sizes: tuple[int, ...]) -> list[Any]:
    mixed = [LayerSpec(Mixed, size, number) if size else nn.Identity() for number, size in enumerate(sizes)]
    return [LayerSpec(Begin), *mixed, LayerSpec(End)]


def items(step: int, copy: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(10 * step + copy)
    lengths = [(3 + 4 * copy + number + step) % 9 + 1 for number in range(COUNT)]
    return [(torch.randn(n, WIDTH, generator=draws), torch.randn(n, 3, generator=draws)) for n in lengths]


def reference(sizes: tuple[int, ...]) -> Expected:
    """The same model in one process."""
    torch.manual_seed(3)
    model = PipelineModule(layers(tuple(map(bool, sizes))), num_stages=1, loss_fn=loss_fn)

    def loss(module: Any, number: int, copy: int) -> torch.Tensor:
        inputs, labels = items(number // 10, copy)[number % 10]
        return loss_fn(module(inputs), labels)

    optimizer = lambda given: torch.optim.AdamW(given, lr=1e-2, eps=1e-5)  # noqa: E731
    return plain_run(model, 3, COPIES, COUNT, loss=loss, optimizer=optimizer)


def logical(name: str, ep_size: int) -> str:
    """The name where all experts are."""
    before, mark, after = name.partition("deepspeed_experts.")
    if not mark:
        return name
    number, _, own = after.partition(".")
    return f"{before}{mark}{int(number) + get_rank() % COPIES * (EXPERTS // ep_size)}.{own}"


def _native(cells: list[tuple[tuple[int, ...], int, dict[str, Any]]], wanted: dict[tuple[int, ...], Any]) -> None:
    for sizes, stage, more in cells:
        torch.manual_seed(3)
        module = PipelineModule(layers(sizes), num_stages=2, loss_fn=loss_fn, partition_method="uniform", **more)
        engine = deepspeed.initialize(
            model=module,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": COUNT,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.01}},
                "gradient_clipping": 0.5,
                "zero_optimization": {"stage": stage, **(SHARDED if stage == 3 else {})},
            },
        )[0]
        expected = wanted[sizes]
        weights = expected.state
        what = f"ep {sizes}, stage {stage}, {more}"
        for step, (loss, norm) in enumerate(zip(expected.losses, expected.norms, strict=True)):
            assert engine.train_batch(iter(items(step, engine.grid.data_parallel_id))).item() == pytest.approx(
                loss, abs=1e-6
            ), f"{what}, step {step}"
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5), f"{what}, step {step}"
        for name, value in engine.iter_full("fp32"):
            size = next((size for number, size in enumerate(sizes) if name.startswith(f"{number + 1}.")), 1)
            torch.testing.assert_close(
                value,
                weights[logical(name, size)] if size > 1 else weights[name],
                rtol=1e-5,
                atol=1e-6,
                msg=f"{what} {name}",
            )
        engine.eval_batch(iter(items(9, engine.grid.data_parallel_id)))
        engine.destroy()


Cells = list[tuple[tuple[int, ...], int, dict[str, Any]]]
CELLS: Cells = [
    ((0, 2), 2, {"schedule": "zb-h1"}),  # the first stage has no experts
    ((2, 2), 3, {}),
]
MORE: Cells = [
    ((2, 2), 1, {}),
    ((2, 1), 0, {"activation_checkpoint_interval": 1}),  # the last stage's layers send nothing
]


def _check(cells: Cells) -> None:
    wanted = {sizes: run_ranks(reference, 1, sizes)[0] for sizes in {cell[0] for cell in cells}}
    run_ranks(_native, 4, cells, wanted, timeout=200)


def test_layers_with_experts_on_two_stages() -> None:
    _check(CELLS)


@pytest.mark.slow
def test_more_layers_with_experts_on_two_stages() -> None:
    _check(MORE)


def _item(step: int, copy: int, micro: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    ids = batch(10 * step + micro, copy)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, : micro + 1] = 0
    return (ids, mask), ids.masked_fill(mask == 0, -100)


def model_reference(kind: str, copies: int = COPIES) -> Expected:
    """The model itself in plain torch, with its own loss, routers' part included."""

    def loss(model: Any, number: int, copy: int) -> torch.Tensor:
        (ids, mask), labels = _item(number // 10, copy, number % 10)
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    optimizer = lambda given: torch.optim.AdamW(given, **ADAMW)  # noqa: E731
    return plain_run(build(kind), STEPS, copies, COUNT, loss=loss, optimizer=optimizer)


def _models(cells: list[tuple[str, int]], wanted: dict[str, Any], tensor: int = 1, copies: int = COPIES) -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=tensor, num_dp=copies)
    for kind, stage in cells:
        module = PipelineModule.from_transformers(build(kind), topology=topology)
        names = transformers_names(module._layer_specs)
        engine = deepspeed.initialize(
            model=module,
            optimizer=adamw(module),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": COUNT,
                "gradient_clipping": 0.5,
                "zero_optimization": {"stage": stage, **(SHARDED if stage == 3 else {})},
                "expert_parallel": {"enabled": True, "autoep_size": copies},
                **({"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}),
            },
        )[0]
        weights = wanted[kind].state
        copy = engine.grid.data_parallel_id
        for step, (loss, norm) in enumerate(zip(wanted[kind].losses, wanted[kind].norms, strict=True)):
            found = engine.train_batch(iter([_item(step, copy, micro) for micro in range(COUNT)])).item()
            assert found == pytest.approx(loss, abs=1e-5), f"{kind}, stage {stage}, step {step}"
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-4), f"{kind}, stage {stage}, {step}"
            counts = getattr(module._layer_specs[0].module_args[0].skeleton.config, "router_aux_loss_coef", 0) > 0
            assert ("router_loss" in (engine.get_additional_losses() or {})) == counts
        parameters = dict(module.named_parameters())
        cut = 0
        for own, value in engine.iter_full("fp32"):
            beginning = next(one for one in names if own.startswith(one))
            whole = weights[names[beginning] + own.removeprefix(beginning)]
            expected = whole
            if not getattr(parameters[own], "allreduce", True):
                expected = whole.chunk(copies)[copy]
            cut += len(expected) < len(whole)
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=2e-5, msg=f"{kind}, stage {stage}: {own}")
        assert cut or copies == 1 or kind == "deepseek_v3"  # whose first stage has dense layers only
        engine.destroy()


def _uneven() -> None:
    with pytest.raises(DeepSpeedConfigError, match="the 3 experts of '2.part.mlp.experts' cannot be divided evenly"):
        deepspeed.initialize(
            model=PipelineModule.from_transformers(build("mixtral", num_local_experts=3), num_stages=2),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "expert_parallel": {"enabled": True, "autoep_size": 2},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            },
        )


MODELS = [("mixtral", 1), ("qwen2_moe", 3), ("deepseek_v3", 2)]


def test_models_whose_experts_are_spread_by_the_configuration() -> None:
    wanted = {kind: run_ranks(model_reference, 1, kind, timeout=200)[0] for kind, _ in MODELS}
    run_ranks(_models, 4, MODELS, wanted, timeout=200)
    run_ranks(_uneven, 4, timeout=200)


def test_stages_of_such_models_cut_over_tensor_parallel_ranks() -> None:
    wanted = {"mixtral": run_ranks(model_reference, 1, "mixtral", 1, timeout=200)[0]}
    run_ranks(_models, 4, [("mixtral", 1)], wanted, 2, 1, timeout=200)


@pytest.mark.slow
def test_three_axes() -> None:
    cells = [("mixtral", 3), ("qwen2_moe", 1), ("deepseek_v3", 2)]
    wanted = {kind: run_ranks(model_reference, 1, kind, timeout=200)[0] for kind, _ in cells}
    run_ranks(_models, 8, cells, wanted, 2, timeout=400)
