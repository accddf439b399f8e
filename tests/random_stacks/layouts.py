"""Features on pipeline, tensor, sequence and expert ranks: they resume bit for bit, and equal one rank without axes.

Ranks without axes also continue from their checkpoint, at another stage.
"""

import json
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from tests.random_stacks.engines import build, mean_over_ranks
from tests.random_stacks.menu import draw_config, is_lossy, possible, tolerance_of
from tests.random_stacks.models import TOKENS, ExpertModel, batch_of, llama_model, pipeline_model
from tests.random_stacks.resuming import at_stage_zero, differs_from, end_of, train_and_resume
from tests.random_stacks.stack import Config, End, Stack, run_on_ranks

WIDTH = 8
SCHEDULES = ("1f1b", "1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev")
_PATTERNS: tuple[Config, ...] = (
    {"mode": "fixed", "num_local_blocks": 2, "num_global_blocks": 1},
    {"mode": "bigbird", "num_random_blocks": 1, "num_sliding_window_blocks": 1, "num_global_blocks": 1},
    {"mode": "bslongformer", "num_sliding_window_blocks": 3, "global_block_indices": [0]},
)
_OF_AXES = (
    "tensor_parallel",
    "sequence_parallel_size",
    "sequence_parallel",
    "seq_parallel_communication_data_type",
    "pipeline",
)
_NAMES = {
    "pipeline": {"blocks.1.up": "up", "blocks.1.down": "down", "blocks.1": "up"},
    "experts": {"blocks.1.up": "blocks.2.up", "blocks.1.down": "blocks.2.down", "blocks.1": "blocks.2"},
    "llama": {"blocks.1.up": "up_proj", "blocks.1.down": "down_proj", "blocks.1": "up_proj"},
}


def draw(seed: int) -> Stack:
    """Returns the features of a seed, a model and a layout of its ranks."""
    dice = Random(seed)
    config, optimizer = draw_config(dice)
    model = dice.choice(("pipeline", "pipeline", "llama", "llama", "experts"))
    world = dice.choice((2, 4)) if model == "experts" else dice.choice((2, 2, 4))
    config = possible(dice, config, optimizer, world)
    for key in ("sparse_gradients", "data_efficiency", "hybrid_engine"):
        config.pop(key, None)
    config["zero_optimization"].pop("leaf_module", None)
    options: dict[str, Any] = {"model": model, "tied": dice.random() < 0.5, "later": dice.choice((0, 1, 2, 3))}
    if model == "pipeline":
        options |= _pipeline(dice, config, optimizer)
    elif model == "llama":
        options |= _llama(dice, config, world)
    else:
        if dice.random() < 0.8:  # experts without tokens are unused parameters
            config["zero_optimization"].pop("ignore_unused_parameters", None)
        options |= {"ep": dice.choice((1, 2)), "expert_groups": optimizer in ("client AdamW", "client SGD", "AdamW")}
    text = json.dumps(config)
    for name, its in _NAMES[model].items():
        text = text.replace(f'"{name}"', f'"{its}"')
    return Stack("layouts", seed, world, json.loads(text), optimizer, options)


def _pipeline(dice: Random, config: Config, optimizer: str) -> dict[str, Any]:
    """Returns the options of a pipeline, and takes most keys of stage 2 and 3 out of a configuration."""
    zero = config["zero_optimization"]
    if zero["stage"] > 1 and dice.random() < 0.8:
        sharded = ("stage3", "zero_", "offload_param", "mics")
        config["zero_optimization"] = {key: value for key, value in zero.items() if not key.startswith(sharded)}
        config["zero_optimization"]["stage"] = dice.choice((0, 1))
    schedule = dice.choice(SCHEDULES)
    by_module = optimizer.startswith("client")  # its parameters must be those of the layers that are divided
    if not by_module:
        config["pipeline"] = {"schedule": schedule}
    for key in ("progressive_layer_drop", "quantize_training", "compression_training"):  # refused in pipelines
        if dice.random() < 0.8:
            config.pop(key, None)
    return {"pp": 2, "recompute": dice.choice((0, 1)), "schedule": schedule if by_module else ""}


def _llama(dice: Random, config: Config, world: int) -> dict[str, Any]:
    """Returns the sizes of the axes of a Llama, and adds them to a configuration."""
    tensor = dice.choice((1, 2))
    sequence = dice.choice((1, 2, 2)) if tensor == 1 or world == 4 else 1
    if tensor > 1:
        more: Config = dice.choice(({}, {"sequence_parallel_norms": True}, {"vocab_parallel_lm_head": True}))
        config["tensor_parallel"] = {"autotp_size": tensor, **more}
    if sequence > 1:
        more = dice.choice(({}, {"tiled_mlp": True, "tile_tokens": 3}, {"tiled_loss": True, "tile_tokens": 2}))
        config["sequence_parallel_size"] = sequence
        if dice.random() < 0.2:
            config["seq_parallel_communication_data_type"] = "fp32"
        config["sequence_parallel"] = {"mode": dice.choice(("ulysses", "ring")), **more}
    if tensor == sequence == 1:
        config["sparse_attention"] = {"apply_to": "model", "block": 2, **dice.choice(_PATTERNS)}
    config.pop("curriculum_learning", None)
    if "keep_in_fp32_modules" in config.get("data_types", {}):  # Llama does not cast what its norm returns
        del config["data_types"]
    return {"tp": tensor, "sp": sequence}


def attempt(stack: Stack, folder: str, timeout: float) -> End:
    """Runs the stack of features that a seed draws, and returns its outcome."""
    return run_on_ranks(work, stack, folder, timeout)


def work(stack: Stack, folder: str) -> End:
    """Runs on every rank."""
    config = stack.config_in(folder)
    layout = Layout(stack, stack.options)
    straight, resumed = train_and_resume(config, f"{folder}/saved", layout.build, layout.train)
    plain: list[str] = []
    if layout.data == 1 and not is_lossy(config) and not resumed:
        without = {key: value for key, value in at_stage_zero(config).items() if key not in _OF_AXES}
        alone = Layout(stack, {**stack.options, "pp": 1, "tp": 1, "sp": 1}, has_same_data=True)
        plain = differs_from(straight, without, alone.build, alone.train, tolerance_of(config))
        without["zero_optimization"] = {"stage": stack.options["later"]}
        saved = f"{folder}/saved"
        plain += differs_from(straight, without, alone.build, alone.train, tolerance_of(config), saved)
    return end_of(stack, resumed, plain, straight.losses)


class Layout:
    """A model on ranks along axes, and its training.

    Args:
        stack: The features.
        sizes: The model and its sizes ``pp``, ``tp``, ``sp`` and ``ep``, 1 where not given.
        has_same_data: Every rank trains on the samples of data rank 0.
    """

    def __init__(self, stack: Stack, sizes: dict[str, Any], *, has_same_data: bool = False) -> None:
        self.stack, self.sizes, self.has_same_data = stack, sizes, has_same_data
        self.model = sizes["model"]
        self.tensor, self.sequence = sizes.get("tp", 1), sizes.get("sp", 1)
        self.data = dist.get_world_size() // (sizes.get("pp", 1) * self.tensor * self.sequence)

    def build(self, config: Config, seed: int) -> Any:
        """Returns an engine with the initial values of ``seed``."""
        torch.manual_seed(seed)
        made: Any
        if self.model == "pipeline":
            more = {key: self.sizes[key] for key in ("tied", "recompute")}
            schedule = self.sizes["schedule"] if self.sizes["pp"] > 1 else ""
            made = pipeline_model(WIDTH, self.sizes["pp"], schedule=schedule, seed=seed, **more)
        elif self.model == "llama":
            made = llama_model(tied=self.sizes["tied"])
        else:
            made = ExpertModel(WIDTH, self.sizes["ep"])
        return build(self.stack, made, config)

    def train(self, engine: Any, start: int, stop: int) -> list[float]:
        """Trains from step ``start`` to ``stop``; returns the losses of micro-batches, or batches of a pipeline."""
        losses = []
        micro_batches = engine.gradient_accumulation_steps()
        for step in range(start, stop):
            batches = [self._batch(engine, step * micro_batches + n) for n in range(micro_batches)]
            if self.model == "pipeline":
                losses.append(float(engine.train_batch(iter(batches))))
                continue
            for batch in batches:
                loss = self._loss(engine, *batch)
                engine.backward(loss)
                engine.step()
                losses.append(mean_over_ranks(loss))
        return losses

    def evaluate(self, engine: Any, number: int) -> float:
        """Returns the loss of a batch, or the mean of the ranks' losses, in evaluation."""
        batch = self._batch(engine, number)
        if self.model == "pipeline":
            return float(engine.eval_batch(iter([batch]), num_micro_batches=1))
        engine.eval()
        with torch.no_grad():
            loss = mean_over_ranks(self._loss(engine, *batch))
        engine.train()
        return loss

    def _batch(self, engine: Any, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.has_same_data:
            return batch_of(number, 0)
        if self.model == "pipeline":
            return batch_of(number, engine.grid.get_data_parallel_rank())
        return batch_of(number, dist.get_rank() // (self.tensor * self.sequence))

    def _loss(self, engine: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor
        if self.model == "experts":
            return engine(ids, labels)
        if self.sequence == 1:
            return engine(input_ids=ids, labels=labels).loss
        from deepspeed.sequence import mean_loss

        place = dist.get_rank() // self.tensor % self.sequence
        tokens = TOKENS // self.sequence
        mine = slice(place * tokens, (place + 1) * tokens)
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        positions = torch.arange(TOKENS)[None, mine].expand(len(ids), -1)
        loss = engine(
            input_ids=ids[:, mine],
            labels=labels[:, mine].contiguous(),
            shift_labels=shifted[:, mine].contiguous(),
            position_ids=positions,
        ).loss
        return mean_loss(loss, shifted[:, mine])
