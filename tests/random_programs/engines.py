"""An engine for one phase of a program: its configuration, its groups of ranks, its model and its optimizer."""

from typing import Any

import torch.distributed as dist

from tests.random_programs import models
from tests.random_programs.names import Names, my_rank
from tests.random_programs.program import Layout, Phase, Program
from tests.random_programs.training import build_optimizer, build_schedule, loss_of, param_groups, prepare
from tests.random_programs.values import ROWS


def config_of(program: Program, phase: Phase, folder: str) -> dict[str, Any]:
    """Returns the ``ds_config`` of a phase."""
    layout, choice = phase.layout, program.optimizer
    zero: dict[str, Any] = {"stage": layout.stage}
    for key, value in layout.zero:
        if key.startswith("offload"):
            value = {"device": value, **({"nvme_path": folder, "buffer_count": 6} if value == "nvme" else {})}
            if key == "offload_param" and value["device"] == "nvme":
                value |= {"buffer_size": 20_000, "max_in_cpu": 0}
        zero[key] = value
    by_no_sync = phase.has("no_sync", -1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1 if by_no_sync else phase.accumulation,
        "gradient_clipping": program.clip,
        "zero_optimization": zero,
    }
    if program.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if program.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 256.0}
    if choice.by_config:
        config["optimizer"] = {"type": choice.name, "params": dict(choice.params)}
        if choice.schedule:
            config["scheduler"] = {"type": choice.schedule, "params": dict(choice.schedule_params)}
    if layout.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tensor}
    if layout.sequence > 1:
        config["sequence_parallel_size"] = layout.sequence
        config["sequence_parallel"] = {"mode": layout.mode}
    if layout.experts > 1 and program.model.kind == "mixtral":
        config["expert_parallel"] = {"enabled": True, "autoep_size": layout.experts}
    return config


def sequence_group(layout: Layout) -> Any:
    """Returns the ranks that share a sequence with this one; None if there are none. Every rank must call it."""
    if layout.sequence == 1:
        return None
    mine = None
    for first in range(0, layout.world, layout.sequence):
        group = dist.new_group(list(range(first, first + layout.sequence)))
        if first <= my_rank() < first + layout.sequence:
            mine = group
    return mine


def build(program: Program, phase: Phase, number: int, frozen: dict[str, bool], folder: str) -> tuple[Any, Names]:
    """Returns the engine of a phase. Every rank must call it.

    Args:
        program: The program.
        phase: Its phase.
        number: Of the phase; later ones begin with other values, which loading replaces.
        frozen: What earlier phases froze or unfroze, by name.
        folder: For offloaded states.
    """
    import deepspeed

    layout, choice = phase.layout, program.optimizer
    module = _module(program, layout, number, frozen)
    names = Names(program, layout, my_rank(), module)
    here = {names.whole(name): parameter for name, parameter in module.named_parameters()}
    if not (program.model.is_transformers and layout.pipe):
        prepare(program, here, frozen, number)
    groups = param_groups(choice, here)
    given: dict[str, Any] = {"model_parameters": groups}
    if not choice.by_config:
        optimizer = build_optimizer(choice, groups)
        given = {"optimizer": optimizer, "lr_scheduler": build_schedule(choice, optimizer)}
    engine = deepspeed.initialize(model=module, config=config_of(program, phase, folder), **given)[0]
    if phase.compiled:
        _compile_layers(engine)
    return engine, names


def _module(program: Program, layout: Layout, number: int, frozen: dict[str, bool]) -> Any:
    model = program.model
    if not layout.pipe:
        if model.kind == "own":
            return models.Own(model.given, sequence_group(layout), layout.experts)
        return models.whole(model)
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import ProcessTopology

    sizes = [layout.pipe, layout.data * layout.sequence, layout.tensor]
    topology = ProcessTopology(axes=["pipe", "data", "model"], dims=sizes)
    more: dict[str, Any] = {
        "topology": topology,
        "schedule": layout.schedule,
        "activation_checkpoint_interval": layout.recompute,
    }
    if model.is_transformers:
        plain = models.transformers_model(model)
        prepare(program, dict(plain.named_parameters()), frozen, number)
        return PipelineModule.from_transformers(plain, **more)
    layers = models.row(model.given, sequence_group(layout), layout.experts)
    loss = _shared_loss if layout.sequence > 1 else _own_loss
    return PipelineModule(layers, loss_fn=loss, partition_method="uniform", **more)


def _own_loss(value: Any, labels: Any) -> Any:
    return loss_of(value[0].float(), value[1], labels)


def _shared_loss(value: Any, labels: Any) -> Any:
    from torch.nn import functional as F

    from deepspeed.sequence import mean_loss

    each = F.cross_entropy(value[0].float().flatten(0, 1), labels.flatten(), reduction="none")
    return mean_loss(each, labels)


def _compile_layers(engine: Any) -> None:
    for module in engine.module.modules():
        if type(module).__name__ in ("Mlp", "Attention", "LlamaDecoderLayer", "GPT2Block"):
            module.compile(backend="eager")
