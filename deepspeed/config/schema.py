"""JSON Schema of the configuration, for editors: completion, hover texts, red lines under misspelt keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deepspeed.config.deprecated import OLD_KEYS
from deepspeed.config.describe import default_of, is_nullable, json_types, nested_in
from deepspeed.config.messages import dotted
from deepspeed.config.section import KeyInfo, Section, facts_of
from deepspeed.config.sections.optimizer import OWN_OPTIMIZERS, TORCH_OPTIMIZERS
from deepspeed.config.sections.root import Root
from deepspeed.config.sections.scheduler import OWN_SCHEDULERS, TORCH_SCHEDULERS

AUTO: dict[str, Any] = {"const": "auto"}


def _definition_name(model: type[Section]) -> str:
    return f"{model.__module__.rsplit('.', 1)[-1]}.{model.__name__}"


def _text(facts: KeyInfo) -> str:
    parts = [facts.about]
    if facts.no_effect is not None:
        parts.append(f"No effect here: {facts.no_effect}.")
    if facts.null_means is not None:
        parts.append(f"null: {facts.null_means}.")
    if facts.unit is not None:
        parts.append(f"Unit: {facts.unit}.")
    return " ".join(parts)


def _limits(facts: KeyInfo) -> dict[str, float]:
    limits = {
        "minimum": facts.minimum,
        "exclusiveMinimum": facts.above,
        "maximum": facts.maximum,
        "exclusiveMaximum": facts.below,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


def _with_limits(alternative: dict[str, Any], facts: KeyInfo) -> dict[str, Any]:
    if alternative.get("type") in ("integer", "number"):
        return {**alternative, **_limits(facts)}
    if alternative.get("type") == "array" and alternative["items"].get("type") in ("integer", "number"):
        count = {} if facts.length is None else {"minItems": facts.length, "maxItems": facts.length}
        return {**alternative, **count, "items": {**alternative["items"], **_limits(facts)}}
    return alternative


class _SchemaWriter:
    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}

    def reference(self, model: type[Section]) -> dict[str, str]:
        """Returns a reference to a section's definition, which is made on first use."""
        name = _definition_name(model)
        if name not in self.definitions:
            self.definitions[name] = {}  # Holds the place while the definition is made.
            self.definitions[name] = self.section(model)
        return {"$ref": f"#/$defs/{name}"}

    def section(self, model: type[Section]) -> dict[str, Any]:
        """Returns the object schema of a section."""
        properties: dict[str, Any] = {}
        required = []
        for name, field in model.model_fields.items():
            properties[name] = self.key(field.annotation, facts_of(field), default_of(field), field.is_required())
            if field.is_required():
                required.append(name)
            for alias in facts_of(field).aliases:
                properties[alias] = {**properties[name], "description": f"The same as {name}."}
        schema: dict[str, Any] = {
            "type": "object",
            "description": " ".join((model.__doc__ or "").split()),
            "properties": properties,
            "patternProperties": {"^_": {}},
            "additionalProperties": False,
        }
        if required:
            schema["required"] = required
        return schema

    def key(self, annotation: Any, facts: KeyInfo, default: Any, required: bool) -> dict[str, Any]:
        """Returns the schema of one key."""
        nested = nested_in(annotation)
        alternatives: list[dict[str, Any]]
        if nested is None:
            alternatives = [_with_limits(each, facts) for each in json_types(annotation)]
        else:
            inner: dict[str, Any] = dict(self.reference(nested.model))
            if nested.kind == "list":
                inner = {"type": "array", "items": inner}
            elif nested.kind == "map":
                inner = {"type": "object", "additionalProperties": inner}
            alternatives = [inner, *([{"type": "null"}] if is_nullable(annotation) else [])]
        if {} not in alternatives and not any("auto" in each.get("enum", ()) for each in alternatives):
            alternatives.append(AUTO)
        schema: dict[str, Any] = {"description": _text(facts)}
        if alternatives != [{}]:
            schema["anyOf"] = alternatives
        if not required and not isinstance(default, Section):
            schema["default"] = default
        if facts.removed is not None or facts.no_effect is not None:
            schema["deprecated"] = True
        return schema


def _add_old_keys(writer: _SchemaWriter, root: dict[str, Any]) -> None:
    for entry in OLD_KEYS:
        parent = root
        for part in entry.old[:-1]:
            following = parent["properties"].get(part)
            reference = following and next(
                (each["$ref"] for each in following.get("anyOf", ()) if "$ref" in each), None
            )
            if not reference:
                parent = {}
                break
            parent = writer.definitions[reference.rsplit("/", 1)[-1]]
        if parent:
            names = " and ".join(dotted(path) for path in entry.new)
            parent["properties"][str(entry.old[-1])] = {
                "description": f"Old name of {names}. {entry.about}",
                "deprecated": True,
            }
    root["properties"]["allgather_size"] = {
        "description": "Went with zero_optimization: true; now zero_optimization.allgather_bucket_size.",
        "deprecated": True,
    }
    root["properties"]["zero_optimization"]["anyOf"].append({"type": "boolean"})


def _parameters(writer: _SchemaWriter, section: str, models: Mapping[str, type[Section]]) -> None:
    """Adds the schema of ``params`` that belongs to its ``type``."""
    definition = writer.definitions[section]
    definition["properties"]["type"]["examples"] = list(models)
    definition["allOf"] = [
        {
            "if": {"properties": {"type": {"const": name}}, "required": ["type"]},
            "then": {"properties": {"params": writer.reference(model)}},
        }
        for name, model in models.items()
    ]


def config_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of a training configuration."""
    writer = _SchemaWriter()
    root = writer.section(Root)
    _add_old_keys(writer, root)
    _parameters(writer, "optimizer.Optimizer", {**OWN_OPTIMIZERS, **TORCH_OPTIMIZERS})
    # Adam's table does not depend on torch_adam, which adds the arguments of torch's classes; let those pass in
    # editors.
    writer.definitions["optimizer.AdamParams"]["additionalProperties"] = True
    _parameters(writer, "scheduler.Scheduler", {**OWN_SCHEDULERS, **TORCH_SCHEDULERS})
    for model in (*OWN_OPTIMIZERS.values(), *TORCH_OPTIMIZERS.values()):
        writer.definitions[_definition_name(model)]["properties"]["max_grad_norm"] = {
            "description": "Old name of gradient_clipping.",
            "deprecated": True,
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ds_config",
        **root,
        "$defs": dict(sorted(writer.definitions.items())),
    }


def schema_text() -> str:
    """Returns the schema as the text of the committed file."""
    return json.dumps(config_schema(), indent=1, ensure_ascii=False) + "\n"
