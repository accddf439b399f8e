"""Writes the reference page of the configuration from the declarations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.config.deprecated import OLD_KEYS
from deepspeed.config.describe import default_of, expectation, nested_in
from deepspeed.config.messages import Path, dotted
from deepspeed.config.section import Section, facts_of
from deepspeed.config.sections.inference import Inference
from deepspeed.config.sections.optimizer import (
    MISSING_OPTIMIZERS,
    NOT_ELEMENTWISE,
    OWN_OPTIMIZERS,
    TORCH_OPTIMIZERS,
    TorchAdamParams,
    TorchAdamWParams,
)
from deepspeed.config.sections.root import Root
from deepspeed.config.sections.scheduler import OWN_SCHEDULERS, TORCH_SCHEDULERS, UNUSABLE_SCHEDULERS
from deepspeed.config.suggest import CONFUSIONS, WRAPPERS
from deepspeed.missing_features import FEATURES

HEAD = """\
# Configuration reference

Every key of a `ds_config`, generated from `deepspeed/config/sections` by `python -m deepspeed.config reference`.
`docs/reference/ds_config.schema.json` has the same for editors; `python -m deepspeed.config check FILE` checks a file.

## Reading

- **Source**: a dict, the path of a file, or URL-safe base64 of JSON. A file is Hjson: JSON with comments (`#`, `//`,
  `/* */`), trailing commas, unquoted keys and texts. A key that occurs twice is refused.
- **Unknown keys are refused**, at every level. One error lists all of them, with the line and the nearest known key.
  With `DEEPSPEED_UNKNOWN_CONFIG_KEYS=warn` each is a warning instead. Keys that begin with `_` are comments.
- **Keys of other programs** at the top level, which resemble no key of this package (`"cuda_visible_devices"`,
  `"num-layers"`), are accepted with one warning that lists them. A known path with dots (`"zero_optimization.stage"`)
  is accepted with one line. None of them has an effect.
- **Values**: a whole number may be written `5e8`, a number as text (`"500"`, `"5e8"`), a switch as true/false, 1/0,
  yes/no, on/off, t/f, y/n in any case. Dtypes: `fp32`, `fp16`, `bf16` and their longer forms.
- **`"auto"`** means the default, and a warning shows which value that is. In a batch key it is refused unless other
  keys determine the value, and so is a learning rate.
- null is as good as an absent section, and as a default that is false, 0 or empty.
- In a section that is switched off by name (`"enabled": false`), unknown keys and impossible values give one line each:
  they could not change anything.
- *No effect* marks keys that are accepted because existing files have them, with the reason why they do nothing here. A
  value other than the default gives one line in the log.

## Batch sizes

`train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel size`

| Given | Derived |
|---|---|
| all three | nothing; the product is checked |
| total, micro-batch | accumulation |
| total, accumulation | micro-batch |
| micro-batch, accumulation | total |
| total | accumulation 1, micro-batch |
| micro-batch | accumulation 1, total |
| accumulation, or none | refused |
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = default_of(field)
    if isinstance(value, Section):
        return "see below"
    return f"`{json.dumps(value)}`"


_UNSUPPORTED = {key.name: feature for feature in FEATURES for key in feature.keys}


def _meaning(field: Any, name: str) -> str:
    facts = facts_of(field)
    parts = [facts.about]
    if name in _UNSUPPORTED and default_of(field) is False:
        parts.append("true is not supported yet.")
    if facts.null_means is not None:
        parts.append(f"null: {facts.null_means}.")
    if facts.min_stage:
        parts.append(f"Stage {facts.min_stage} only.")
    if facts.no_effect is not None:
        parts.append(f"*No effect*: {facts.no_effect}.")
    if facts.aliases:
        parts.append(f"Also spelt {', '.join(f'`{alias}`' for alias in facts.aliases)}.")
    if facts.since is not None:
        parts.append(f"Since {facts.since}.")
    if facts.removed is not None:
        parts.append(f"Removed upstream in {facts.removed}.")
    return " ".join(parts)


def _table(model: type[Section], path: Path = ()) -> Iterable[str]:
    yield "| Key | Takes | Default | Unit | Meaning |"
    yield "|---|---|---|---|---|"
    for name, field in model.model_fields.items():
        meaning = _meaning(field, dotted((*path, name)))
        cells = (f"`{name}`", expectation(field), _default(field), facts_of(field).unit or "", meaning)
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"
    yield ""


def _section(model: type[Section], path: Path, level: int) -> Iterable[str]:
    yield f"{'#' * level} `{dotted(path).replace('.[]', '[]')}`"
    yield ""
    missing = _UNSUPPORTED.get(dotted(path)) or _UNSUPPORTED.get(f"{dotted(path)}.enabled")
    note = "" if missing is None else f" Not supported yet. {missing.instead}"
    yield " ".join((model.__doc__ or "").split()) + note
    yield ""
    yield from _table(model, path)
    yield from _inner(model, path, level)


def _inner(model: type[Section], path: Path, level: int) -> Iterable[str]:
    for name, field in model.model_fields.items():
        nested = nested_in(field.annotation)
        if nested is not None:
            step = {"section": (), "list": ("[]",), "map": ("<name>",)}[nested.kind]
            yield from _section(nested.model, (*path, name, *step), min(level + 1, 6))


def _parameter_tables(title: str, models: Mapping[str, type[Section]]) -> Iterable[str]:
    yield f"## {title}"
    yield ""
    done: dict[type[Section], str] = {}
    for name, model in models.items():
        if model in done:
            continue
        names = [each for each, other in models.items() if other is model]
        done[model] = name
        yield f"### {', '.join(f'`{each}`' for each in names)}"
        yield ""
        yield " ".join((model.__doc__ or "").split())
        yield ""
        yield from _table(model)


def _two_columns(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Iterable[str]:
    yield f"| {head[0]} | {head[1]} |"
    yield "|---|---|"
    for left, right in rows:
        yield f"| {_cell(left)} | {_cell(right)} |"
    yield ""


def _refused_names(title: str, reasons: Mapping[str, str]) -> Iterable[str]:
    yield f"### {title}"
    yield ""
    yield from _two_columns(("Name", "Reason"), ((f"`{name}`", why) for name, why in reasons.items()))


TASKS = {
    "choose batch sizes": "", "choose an optimizer and a schedule": "optimizer scheduler",
    "compute in 16 bits": "fp16 bf16 torch_autocast data_types", "shard the model states": "zero_optimization",
    "keep states on the host or on NVMe": "zero_optimization.offload_optimizer zero_optimization.offload_param aio",
    "recompute activations": "activation_checkpointing", "cut layers over ranks": "tensor_parallel",
    "spread experts": "expert_parallel", "divide sequences": "sequence_parallel", "run a pipeline": "pipeline",
    "send fewer bytes": "communication_compression zero_optimization", "compile": "compile",
    "save and load": "checkpoint", "see what a run does": "tensorboard csv_monitor wandb comet run_report trace timers",
    "see what it costs": "flops_profiler comms_logger", "find a configuration": "autotuning",
    "survive lost ranks and stops": "elasticity preemption",
    "choose and order samples": "data_efficiency curriculum_learning",
    "make attention sparse": "sparse_attention", "make the model smaller": "compression_training quantize_training",
    "train with few bits or adapters": "weight_quantization", "generate between steps": "hybrid_engine",
}  # fmt: skip
"""What one wants to do, and the sections for it; none: the keys at the top level."""


def _tasks() -> Iterable[str]:
    yield "## By task"
    yield ""
    links = {
        task: ", ".join(f"[`{name}`](#{name.replace('.', '')})" for name in names.split()) or "[top level](#top-level)"
        for task, names in TASKS.items()
    }
    yield from _two_columns(("To", "Sections"), links.items())


def _lines() -> Iterable[str]:
    yield HEAD
    yield from _tasks()
    yield "## Top level"
    yield ""
    yield from _table(Root)
    yield from _inner(Root, (), 1)
    torch_adam = {
        "Adam with torch_adam, without adam_w_mode": TorchAdamParams,
        "Adam or AdamW with torch_adam": TorchAdamWParams,
    }
    yield from _parameter_tables("Parameters of optimizers", {**OWN_OPTIMIZERS, **torch_adam, **TORCH_OPTIMIZERS})
    yield from _refused_names("Refused optimizers", {**MISSING_OPTIMIZERS, **NOT_ELEMENTWISE})
    yield from _parameter_tables("Parameters of schedules", {**OWN_SCHEDULERS, **TORCH_SCHEDULERS})
    yield from _refused_names("Refused schedules", UNUSABLE_SCHEDULERS)
    yield "## Not supported yet"
    yield ""
    yield "Switching one of these on is refused by name. The key may be in the file if it is switched off."
    yield ""
    missing = [(f"`{key.name}`", feature.heading) for feature in FEATURES for key in feature.keys]
    yield from _two_columns(("Key", "Feature"), missing)
    yield "## Old names"
    yield ""
    yield "Each is translated, with one line in the log. It is an error to give the present name another value."
    yield ""
    old = [
        (f"`{dotted(entry.old)}`", ", ".join(f"`{dotted(new)}`" for new in entry.new), entry.about)
        for entry in OLD_KEYS
    ]
    yield from _two_columns(("Old", "Now"), ((left, f"{right}. {about}") for left, right, about in old))
    yield "`zero_optimization: true` is `{stage: 1}` and `false` is `{stage: 0}`. Beside `true` a top-level"
    yield "`allgather_size` is `zero_optimization.allgather_bucket_size`; elsewhere it has no effect."
    yield ""
    yield "## Common mistakes"
    yield ""
    yield from _two_columns(("Written", "Meant"), ((f"`{left}`", f"`{right}`") for left, right in CONFUSIONS.items()))
    wrappers = ", ".join(f"`{name}`" for name in WRAPPERS)
    yield f"{wrappers} are ignored with a warning: their contents belong at the top level."
    yield ""
    yield "## Configuration of inference"
    yield ""
    yield "An object of its own, for `init_inference`. A key without effect gives one line in the log."
    yield ""
    yield from _table(Inference)
    for name in ("tensor_parallel", "moe", "quant", "checkpoint_config"):
        nested = nested_in(Inference.model_fields[name].annotation)
        assert nested is not None
        yield from _section(nested.model, ("inference", name), 3)


def reference_text() -> str:
    """Returns the text of ``docs/reference/config.md``."""
    return "\n".join(_lines()).rstrip("\n") + "\n"
