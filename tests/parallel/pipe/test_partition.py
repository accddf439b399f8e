"""How the row of layers is cut, and what is asked of topologies; no ranks are needed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.pipe.cut import best_cut
from deepspeed.parallel.pipe.partition import chunk_bounds, costs_by_size, counted_costs
from deepspeed.parallel.pipe.spec import class_name
from deepspeed.parallel.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    mesh_of_topology,
    usual_topology,
)
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tests.harness import on_ranks

NAMES = ["Embed", "Block", "Block", "Norm", "Block", "Block", "Head"]
SIZES = [90, 10, 10, 1, 10, 10, 90]


@pytest.mark.parametrize(
    ("method", "parts", "bounds"),
    [
        ("uniform", 3, [0, 3, 5, 7]),
        ("parameters", 2, [0, 3, 7]),
        ("type:block", 2, [0, 3, 7]),
        ("type:Block=1,Head=2", 2, [0, 5, 7]),
        ([0, 1, 6, 7], 3, [0, 1, 6, 7]),
    ],
)
def test_methods(method, parts, bounds):
    found = chunk_bounds(method, SIZES, NAMES, parts)
    assert found[0] == 0 and found[-1] == 7 and all(a < b for a, b in zip(found, found[1:], strict=False))
    if method in ("parameters", "type:block"):  # several cuts are equally good
        weights = SIZES if method == "parameters" else [name == "Block" for name in NAMES]
        sums = [sum(weights[a:b]) for a, b in zip(found, found[1:], strict=False)]
        assert max(sums) == max(sum(weights[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))
    elif method != "uniform":
        assert found == bounds
    else:
        assert max(b - a for a, b in zip(found, found[1:], strict=False)) == 3


@pytest.mark.parametrize("parts", range(1, 8))
@pytest.mark.parametrize("method", ["uniform", "parameters", "type:block", "type:head"])
def test_no_part_is_empty(method, parts):
    bounds = chunk_bounds(method, [0, 0, 0, 0, 0, 0, 5], NAMES, parts)
    assert len(bounds) == parts + 1 and all(a < b for a, b in zip(bounds, bounds[1:], strict=False))


@pytest.mark.parametrize(
    ("method", "parts", "text"),
    [
        ("uniform", 8, "7 layers cannot be cut into 8 parts"),
        ("type:attention", 2, "no layer's class name matches; the layers are Embed, Block, Norm, Head"),
        ("fastest", 2, "expected 'uniform', 'parameters', 'plan', 'type:regex', or a list of bounds"),
        ([0, 3, 3, 7], 3, "expected 4 bounds that begin with 0"),
        ([0, 3, 6], 2, "end with the number of layers, 7"),
    ],
)
def test_what_cannot_be_cut(method, parts, text):
    with pytest.raises(DeepSpeedConfigError, match=text):
        chunk_bounds(method, SIZES, NAMES, parts)


class _Tokens(nn.Module):
    """Large and cheap: it looks rows up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5000, 64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)


def _logits(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ module.weight.T


def _language_model() -> list[object]:
    blocks = [LayerSpec(nn.Sequential, nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
    return [TiedLayerSpec("t", _Tokens), *blocks, TiedLayerSpec("t", _Tokens, forward_fn=_logits)]


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss, {"loss": loss.detach()}


def test_costs_are_counted_without_values():
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    entries = _language_model()
    costs, loss = counted_costs(entries, _cross_entropy, (tokens, tokens))
    look_up, block, head = costs[0], costs[1], costs[-1]
    assert [cost.forward for cost in costs[1:-1]] == [block.forward] * 8
    # A product of matrices: 2 operations per element and token, twice as many in the backward.
    operations = 2 * (2 * 64 * 256) * 64
    assert block.forward > operations / 100 and block.backward == pytest.approx(2 * block.forward, rel=0.3)
    assert head.forward > 5 * block.forward and loss is not None and loss.forward > block.forward
    assert look_up.state == head.state == 16 * 5000 * 64
    # Kept until the backward: the block's input, both sides of the activation function.
    assert block.activation == 4 * 64 * (64 + 256 + 256)
    assert not any(p.grad is not None for entry in entries[1:-1] for m in entry.module_args for p in m.parameters())
    with pytest.raises(DeepSpeedConfigError, match=r"layer 1 \(Sequential\) cannot be run without values"):
        counted_costs([entries[0], LayerSpec(nn.Sequential, nn.Linear(63, 2))], None, (tokens, tokens))


def _recomputed_together(interval: int) -> list[int]:
    """Layers in each block that is recomputed, of 3."""
    ran, blocks = [], []

    def recompute(run: Callable[..., Any], *values: Any) -> Any:
        before = len(ran)
        result = run(*values)
        blocks.append(len(ran) - before)
        return result

    layers = [nn.Linear(4, 4) for _ in range(3)]
    for layer in layers:
        layer.register_forward_hook(lambda module, *_: ran.append(module))
    module = PipelineModule(
        layers, num_stages=1, activation_checkpoint_interval=interval, activation_checkpoint_func=recompute
    )
    module(torch.ones(1, 4))
    assert ran == layers
    return blocks


@on_ranks(1)
def test_the_interval_sets_how_many_layers_are_recomputed_together() -> None:
    assert [_recomputed_together(interval) for interval in (0, 1, 2, 5)] == [[], [1, 1, 1], [2, 1], [3]]


def test_the_loss_and_the_head_get_fewer_blocks_beside_them():
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    layers, loss = counted_costs(_language_model(), _cross_entropy, (tokens, tokens))
    counted = best_cut(layers, "1f1b", 2, 8, loss=loss)
    by_size, guessed = costs_by_size(_language_model(), with_loss=True)
    assert counted.bounds[1] > best_cut(by_size, "1f1b", 2, 8, loss=guessed).bounds[1] >= 5
    # Room for few activations moves the cut towards the stage that holds more of them.
    roomy, tight = counted.peak_bytes, best_cut(layers, "1f1b", 2, 8, loss=loss, limit=max(counted.peak_bytes) - 1)
    assert max(tight.peak_bytes) < max(roomy) and tight.step_time >= counted.step_time


def test_topologies():
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert topology.get_axis_names() == ["pipe", "data", "model"] and topology.world_size() == 12
    assert topology.get_rank(pipe=1, data=2, model=0) == (1 * 3 + 2) * 2
    assert topology.get_coord(7) == topology.ProcessCoord(pipe=1, data=0, model=1)
    assert (
        topology.get_rank_repr(7) == "model_01" and topology.get_rank_repr(7, omit_axes=["model"]) == "pipe_01-data_00"
    )
    assert topology.get_axis_comm_lists("pipe") == [[rank, rank + 6] for rank in range(6)]
    assert topology.get_axis_comm_lists("nothing") == [] and topology.get_dim("nothing") == 0
    assert topology.filter_match(pipe=0, model=1) == [1, 3, 5] and topology.get_axis_list("data", 1) == [2, 3, 8, 9]
    assert mesh_of_topology(topology).axes == (("pipe", 2), ("data", 3), ("tensor", 2))
    two = PipeDataParallelTopology(num_pp=2, num_dp=2)
    assert two.get_axis_comm_lists("data") == [[0, 1], [2, 3]] and two.get_rank_repr(3) == ""
    with pytest.raises(ValueError, match="expected a coordinate on each of"):
        two.get_rank(pipe=0)
    with pytest.raises(AssertionError):
        two.get_rank(pipe=0, data=2)
    with pytest.raises(ValueError, match="there is no rank 4"):
        two.get_coord(4)
    with pytest.raises(ValueError, match="one size of at least 1 for each name"):
        ProcessTopology(["pipe", "data"], [2])


@pytest.mark.parametrize("world", range(1, 25))
def test_the_usual_topology_uses_every_rank(world):
    topology = usual_topology(world)
    assert topology.get_dim("pipe") * topology.get_dim("data") == world


@pytest.mark.parametrize(("norms", "blocks"), [(2, range(1, 3)), (3, range(4, 7))])
def test_the_repeated_blocks_are_the_first_of_the_longest_runs(norms, blocks):
    row = [LayerSpec(nn.Embedding, 3, 2), *(LayerSpec(nn.Linear, 2, 2) for _ in range(2)), LayerSpec(nn.Tanh)]
    row += [LayerSpec(nn.LayerNorm, 2) for _ in range(norms)]
    assert PipelineModule.run_of_blocks(SimpleNamespace(_names=[class_name(entry) for entry in row])) == blocks


class CutByProgram(PipelineModule):
    """Cuts its layers itself, with a method that only it knows."""

    bounds = [0, 3, 4]

    def _partition_layers(self, method="uniform"):
        assert method == "manual"
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(self.bounds)
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


class WithoutParts(CutByProgram):
    def _partition_layers(self, method="uniform"):
        self._set_bounds(0, 1)


class OtherBounds(CutByProgram):
    def _partition_layers(self, method="uniform"):
        self.parts = [0, 3, 4]
        self._set_bounds(start=0, stop=1)


class TooManyParts(CutByProgram):
    bounds = [0, 1, 3, 4]


@on_ranks(2)
def test_a_class_that_cuts_its_layers_itself() -> None:
    def module(kind):
        layers = [nn.Linear(4, 4) for _ in range(4)]
        return kind(layers, num_stages=2, partition_method="manual", loss_fn=nn.MSELoss())

    pipeline = module(CutByProgram)
    assert [index for index in range(4) if pipeline.stage_owner(index) == pipeline.stage_id] == (
        [0, 1, 2] if pipeline.stage_id == 0 else [3]
    )
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = deepspeed.initialize(model=pipeline, config=config)[0]
    engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))]))
    assert sum(value.numel() for value in pipeline.parameters()) == (60 if pipeline.stage_id == 0 else 20)
    with pytest.raises(DeepSpeedConfigError, match="expected it to set self.parts, found none"):
        module(WithoutParts)
    with pytest.raises(DeepSpeedConfigError, match="expected self._set_bounds to get the layers of this stage"):
        module(OtherBounds)
    with pytest.raises(DeepSpeedConfigError, match=r"\[0, 1, 3, 4\]"):
        module(TooManyParts)
    with pytest.raises(DeepSpeedConfigError, match="partition_method='manual'"):
        module(PipelineModule)
