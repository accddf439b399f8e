"""Pipelines whose ranks share sequences: the losses, norms and weights of one process that has the whole of both."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError, PipelineError
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
from deepspeed.sequence import mean_loss
from tests.ecosystem.support import needs_transformers
from tests.engine.support import SHARDED
from tests.harness import on_ranks
from tests.harness.pool import run_ranks
from tests.parallel.pipe.test_never_hang import SOON, raised_by
from tests.parallel.sequence import net
from tests.parallel.sequence.llama import llama, packed_batch, padded_batch, plain_batch

COUNT, STEPS, SHARERS = 3, 3, 2
Results = list[tuple[float, float]]


def _config(stage: int, sharers: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": 0.5,
        "sequence_parallel_size": sharers,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, **(SHARDED if stage == 3 else {})},
        **more,
    }


def _updated(model: nn.Module, copies: int, loss_of: Any) -> Results:
    """Plain torch: ``loss_of(step, copy, number)`` is the mean over the tokens of a micro-batch that count."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, weight_decay=0.1)
    result = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for copy in range(copies):
            for number in range(COUNT):
                loss = loss_of(step, copy, number) / COUNT / copies
                loss.backward()
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)
        optimizer.step()
        result.append((total, norm.item()))
    return result


def _near(found: Results, wanted: Results, what: Any) -> None:
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(wanted), rtol=2e-5, atol=1e-6, msg=lambda text: f"{what} {text}"
    )


# -- layers of one's own ----------------------------------------------------------------------------------------------


class _Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(net.VOCABULARY, net.WIDTH)
        self.places = nn.Embedding(net.TOKENS, net.WIDTH)

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, positions = value
        made: torch.Tensor = self.words(ids) + self.places(positions)
        return made


def _layers(group: Any) -> list[Any]:
    return [
        LayerSpec(_Embed),
        *(LayerSpec(net.Block, 4, 2, group) for _ in range(3)),
        LayerSpec(nn.Linear, net.WIDTH, net.VOCABULARY),
    ]


def _item(step: int, copy: int, number: int) -> dict[str, torch.Tensor]:
    return net.batch(10 * number + copy, step)


def _mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return mean_loss(each, labels)


def _plain(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _whole() -> tuple[Results, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    module = PipelineModule(_layers(None), num_stages=1, seed_layers=True, partition_method="uniform")

    def loss_of(step: int, copy: int, number: int) -> torch.Tensor:
        whole = _item(step, copy, number)
        return _plain(module((whole["ids"], whole["positions"])), whole["labels"])

    result = _updated(module, 1, loss_of)
    return result, {name: parameter.detach() for name, parameter in module.named_parameters()}


def _own(cells: list[tuple[int, dict[str, int], dict[str, Any]]], wanted: Any) -> None:
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), SHARERS)]
    group, place = pairs[dist.get_rank() // SHARERS], dist.get_rank() % SHARERS
    for stage, sizes, given in cells:
        stages = (
            {"topology": ProcessTopology(axes=list(sizes), dims=list(sizes.values()))} if sizes else {"num_stages": 2}
        )
        module = PipelineModule(
            _layers(group), loss_fn=_mean, seed_layers=True, partition_method="uniform", **stages, **given
        )
        engine = deepspeed.initialize(model=module, config=_config(stage, SHARERS))[0]
        assert (engine.sequence_parallel_size, engine.dp_world_size, engine.num_stages) == (SHARERS, 1, 2)
        result = []
        for step in range(STEPS):
            parts = [net.cut(_item(step, 0, number), place, SHARERS) for number in range(COUNT)]
            items = [((part["ids"], part["positions"]), part["labels"]) for part in parts]
            result.append((engine.train_batch(iter(items)).item(), engine.get_global_grad_norm()))
        _near(result, wanted[0], (stage, given))
        for name, value in engine.iter_full("fp32"):
            torch.testing.assert_close(value, wanted[1][name], rtol=1e-4, atol=1e-5)
        engine.destroy()


def test_layers_of_ones_own():
    cells = [
        (1, {}, {}),
        (3, {}, {"schedule": "zb-h1"}),
        (2, {"pipe": 2, "data": 1, "sequence": SHARERS}, {"schedule": "interleaved"}),
    ]
    run_ranks(_own, 4, cells, run_ranks(_whole, 1)[0])


# -- layers of a Transformers model -----------------------------------------------------------------------------------


def _batch(step: int, copy: int, number: int) -> dict[str, torch.Tensor]:
    sample = 10 * number + copy
    if number % 3 == 0:
        return packed_batch(sample, step)
    return padded_batch(sample + 100 * step, left=True) if number % 3 == 1 else plain_batch(sample, step)


def _whole_model(kind: dict[str, Any], copies: int) -> tuple[Results, float, dict[str, torch.Tensor]]:
    model = llama(num_hidden_layers=4, **kind)

    def loss_of(step: int, copy: int, number: int) -> torch.Tensor:
        given = _batch(step, copy, number)
        labels = given.pop("shift_labels")
        return _plain(model(**given, use_cache=False).logits, labels)

    result = _updated(model, copies, loss_of)
    with torch.no_grad():
        later = [loss_of(STEPS, copy, number) for copy in range(copies) for number in range(COUNT)]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return result, torch.stack(later).mean().item(), weights


def _items(step: int, copy: int, place: int) -> list[tuple[Any, Any]]:
    found = []
    for number in range(COUNT):
        part = net.cut(_batch(step, copy, number), place, SHARERS)
        labels = part.pop("shift_labels")
        found.append((part, {"shift_labels": labels}))
    return found


Cells = list[tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]]


def _model(cells: Cells, wanted: list[Any], tensor: int = 1) -> None:
    from deepspeed.parallel.pipe.transformers_models import transformers_names

    for (stage, kind, more, given), (expected, later, weights) in zip(cells, wanted, strict=True):
        rank, copies = dist.get_rank() // tensor, dist.get_world_size() // tensor // SHARERS // 2
        place, copy = rank % SHARERS, rank // SHARERS % copies
        topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, copies * SHARERS, tensor])
        module = PipelineModule.from_transformers(llama(num_hidden_layers=4, **kind), topology=topology, **given)
        names = transformers_names(module._layer_specs)
        engine = deepspeed.initialize(model=module, config=_config(stage, SHARERS, **more))[0]
        assert (engine.sequence_parallel_size, engine.dp_world_size) == (SHARERS, copies)
        result = []
        for step in range(STEPS):
            result.append((engine.train_batch(iter(_items(step, copy, place))).item(), engine.get_global_grad_norm()))
        _near(result, expected, (stage, kind, more, given))
        assert engine.eval_batch(iter(_items(STEPS, copy, place))).item() == pytest.approx(later, rel=1e-4)
        for own, value in engine.iter_full("fp32"):
            beginning = next(one for one in names if own.startswith(one))
            wanted_value = weights[names[beginning] + own.removeprefix(beginning)]
            if wanted_value.shape != value.shape:  # this rank's experts
                wanted_value = wanted_value.chunk(copies)[copy]
            torch.testing.assert_close(value, wanted_value, rtol=1e-4, atol=2e-5)
        engine.destroy()
        deepspeed.utils.groups.set_mesh(None)


def _check(cells: Cells, ranks: int, tensor: int = 1) -> None:
    copies = ranks // tensor // SHARERS // 2
    wanted = [run_ranks(_whole_model, 1, kind, copies)[0] for _, kind, _, _ in cells]
    run_ranks(_model, ranks, cells, wanted, tensor, timeout=200)


RING = {"sequence_parallel": {"mode": "ring"}}
TIED = {"tie_word_embeddings": True}


@needs_transformers
def test_layers_of_a_transformers_model():
    _check([(1, TIED, {}, {}), (3, {}, RING, {"activation_checkpoint_interval": 1})], 4)


MORE: Cells = [
    (2, {}, {"sequence_parallel": {"loss": "own_share"}}, {"schedule": "zb-h1"}),
    (0, {"kind": "Qwen3"}, {}, {"schedule": "interleaved"}),
    (3, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, {}, {}),
]


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("cell", MORE, ids=["own share", "another family", "angles by length"])
def test_more_layers_of_transformers_models(cell):
    _check([cell], 4)


@needs_transformers
@pytest.mark.slow
def test_with_data_ranks_and_experts_too():
    experts = {"kind": "Mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    _check([(1, {}, {}, {}), (2, experts, {"expert_parallel": {"enabled": True, "autoep_size": 2}}, {})], 8)


@needs_transformers
@pytest.mark.slow
def test_with_tensor_ranks_too():
    _check([(1, {}, {"tensor_parallel": {"autotp_size": 2}}, {})], 8, tensor=2)


def _in_turn(number: int) -> dict[str, torch.Tensor]:
    whole = plain_batch(number)
    return {"input_ids": whole["input_ids"], "labels": whole["input_ids"], "position_ids": whole["position_ids"]}


def _whole_loader() -> Results:
    from deepspeed.parallel.pipe.transformers_models import next_token_loss

    model = llama()

    def loss_of(step: int, copy: int, number: int) -> Any:
        given = _in_turn(COUNT * step + number)
        return next_token_loss(model(**given, use_cache=False).logits, given["labels"])

    return _updated(model, 1, loss_of)


def _split_batch(batch: dict[str, torch.Tensor]) -> Any:
    return batch, {"shift_labels": batch.pop("shift_labels")}


def _by_the_adapter() -> Results:
    engine = deepspeed.initialize(
        model=PipelineModule.from_transformers(llama(), num_stages=2), config=_config(1, SHARERS)
    )[0]
    group = engine.get_sequence_parallel_group()
    place = dist.get_rank(group)
    mine = [_in_turn(number) for number in range(place, COUNT * STEPS + 1, SHARERS)]  # the ranks' batches take turns
    engine.set_batch_fn(_split_batch)
    batches = iter(UlyssesSPDataLoaderAdapter(mine, place, group, SHARERS, "cpu"))
    return [(engine.train_batch(batches).item(), engine.get_global_grad_norm()) for _ in range(STEPS)]


@needs_transformers
def test_batches_that_the_adapter_cuts():
    wanted = run_ranks(_whole_loader, 1)[0]
    for found in run_ranks(_by_the_adapter, 4):
        _near(found, wanted, "adapter")


def _fails(bad: int) -> tuple[str, float]:
    module = PipelineModule.from_transformers(llama(num_hidden_layers=4), num_stages=2)
    engine = deepspeed.initialize(model=module, config=_config(1, SHARERS))[0]
    place = dist.get_rank() % SHARERS
    calls = []

    def fail(*_given: Any) -> None:
        calls.append(1)
        if len(calls) == 5 and dist.get_rank() == bad:  # in the third micro-batch
            raise ArithmeticError("this layer cannot take it")

    for layer in module.modules():
        if type(layer).__name__ == "_Block":
            layer.register_forward_pre_hook(fail)
    return raised_by(lambda: engine.train_batch(iter(_items(0, 0, place))))


@needs_transformers
@pytest.mark.parametrize("bad", [1, 2])
def test_an_exception_on_one_rank_ends_all_with_its_words(bad):
    for text, seconds in run_ranks(_fails, 4, bad):
        assert text.startswith(f"PipelineError: train_batch: stage {bad // 2} (rank {bad}), forward of micro-batch "), (
            text
        )
        assert "ArithmeticError: this layer cannot take it" in text
        assert seconds < SOON


@needs_transformers
@on_ranks(2)
def test_unsupported_settings_are_refused_by_name() -> None:
    place = dist.get_rank()
    routed = {"kind": "Mixtral", "num_local_experts": 2, "sliding_window": None, "output_router_logits": True}
    with pytest.raises(NotYetSupportedError, match="output_router_logits: the balance of routers would be that of"):
        deepspeed.initialize(
            model=PipelineModule.from_transformers(llama(**routed), num_stages=1), config=_config(1, SHARERS)
        )
    with pytest.raises(DeepSpeedConfigError, match='a pipeline of LlamaForCausalLM: .* "eager" works on masks'):
        model = PipelineModule.from_transformers(llama(attn_implementation="eager"), num_stages=1)
        deepspeed.initialize(model=model, config=_config(1, SHARERS))
    module = PipelineModule.from_transformers(llama(), num_stages=1)
    engine = deepspeed.initialize(model=module, config=_config(1, SHARERS))[0]
    items = _items(0, 0, place)
    with pytest.raises((PipelineError, DeepSpeedConfigError), match='give {"shift_labels": each token\'s next one}'):
        engine.train_batch(iter([(inputs, labels["shift_labels"]) for inputs, labels in items]))


@needs_transformers
@on_ranks(1)
def test_labels_may_be_shifted_by_whoever_makes_them() -> None:
    from deepspeed.parallel.pipe.transformers_models import next_token_loss

    whole = plain_batch(0)
    logits = llama()(input_ids=whole["input_ids"], use_cache=False).logits
    shifted = next_token_loss(logits, {"shift_labels": whole["shift_labels"]})
    torch.testing.assert_close(next_token_loss(logits, whole["input_ids"]), shifted)
