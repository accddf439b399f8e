"""The committed reference and schema are those of the declarations, and say what the reader does."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed.config.deprecated import OLD_KEYS
from deepspeed.config.describe import entries
from deepspeed.config.reference import reference_text
from deepspeed.config.schema import config_schema, schema_text
from deepspeed.config.sections.root import Root
from tests.config.test_integrations import CLUSTER_PAGE

DOCS = Path(__file__).parents[2] / "docs" / "reference"
REMEDY = "python -m deepspeed.config {} > docs/reference/{}"


@pytest.mark.docs
def test_reference_is_in_step() -> None:
    assert (DOCS / "config.md").read_text() == reference_text(), REMEDY.format("reference", "config.md")


@pytest.mark.docs
def test_schema_is_in_step() -> None:
    found = (DOCS / "ds_config.schema.json").read_text()
    assert found == schema_text(), REMEDY.format("schema", "ds_config.schema.json")


def resolve(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """The object schema behind a key's schema."""
    for each in (node, *node.get("anyOf", ())):
        each = each.get("items", each)
        if isinstance(each.get("additionalProperties"), dict):
            each = each["additionalProperties"]
        if "$ref" in each:
            return schema["$defs"][each["$ref"].removeprefix("#/$defs/")]
    raise AssertionError(f"no section in {node}")


def test_schema_has_every_key_old_names_included() -> None:
    schema = config_schema()
    for path in [entry.path for entry in entries(Root)] + [old.old for old in OLD_KEYS]:
        if path[:2] == ("optimizer", "params"):
            continue
        node = schema
        for part in path:
            if part not in ("[]", "<name>"):
                node = node if "properties" in node else resolve(schema, node)
                node = node["properties"][str(part)]
        assert node["description"]


def accepts(schema: dict[str, Any], node: dict[str, Any], value: Any) -> bool:
    """As much of JSON Schema as this schema uses."""
    if "$ref" in node:
        return accepts(schema, schema["$defs"][node["$ref"].removeprefix("#/$defs/")], value)
    if "anyOf" in node:
        return any(accepts(schema, each, value) for each in node["anyOf"])
    if "const" in node:
        return bool(value == node["const"])
    if "enum" in node:
        return value in node["enum"]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kinds = {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "number": number,
        "integer": number and value == int(value),
    }
    if not kinds.get(node.get("type", ""), True):
        return False
    if number and not (
        value >= node.get("minimum", value)
        and value <= node.get("maximum", value)
        and value > node.get("exclusiveMinimum", value - 1)
        and value < node.get("exclusiveMaximum", value + 1)
    ):
        return False
    if isinstance(value, dict) and "properties" in node:
        for name, item in value.items():
            if name in node["properties"]:
                if not accepts(schema, node["properties"][name], item):
                    return False
            elif not name.startswith("_") and not node.get("additionalProperties"):
                return False
    if isinstance(value, list) and "items" in node:
        return all(accepts(schema, node["items"], item) for item in value)
    return True


def test_schema_accepts_and_refuses_as_the_reader_does() -> None:
    schema = json.loads(schema_text())
    assert accepts(schema, schema, CLUSTER_PAGE)
    assert accepts(schema, schema, {"_comment": 1, "fp16": {"enabled": "auto"}, "zero_optimization": True, "amp": None})
    for wrong in (
        {"train_batch_size": -1},
        {"fp16": {"enabld": True}},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"reduce_bucket_size": "abc"}},
        {"elasticity": {"micro_batch_sizes": [0]}},
        {"fp32": True},
    ):
        assert not accepts(schema, schema, {**CLUSTER_PAGE, **wrong})


def test_reference_names_every_key_with_its_unit() -> None:
    text = reference_text()
    for entry in entries(Root):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{entry.path[-1]}` |"))
        assert row.count("|") >= 6
        if entry.facts.unit is not None:
            assert f"| {entry.facts.unit} |" in text
