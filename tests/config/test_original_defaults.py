"""Every default against the original package's; what differs is on docs/migrating/defaults.md, with its reason."""

import json
from pathlib import Path
from typing import Any

from deepspeed.config.comparing import OTHER_DEFAULTS
from deepspeed.config.describe import default_of, entries
from deepspeed.config.section import Section, facts_of
from deepspeed.config.sections.optimizer import OWN_OPTIMIZERS
from deepspeed.config.sections.root import Root
from deepspeed.config.sections.scheduler import OWN_SCHEDULERS

PAGE = Path(__file__).parents[2] / "docs" / "migrating" / "defaults.md"
REQUIRED = "required"
# Defaults of release 0.19.8; of keys that it has removed, those of 0.19.6. Observed on its configuration objects, and
# taken from its documents where it reads keys from dictionaries. By section, or ``optimizer.params[Name]``.
ORIGINAL = json.loads(Path(__file__).with_name("original_defaults.json").read_text())
# Keys that the original does not have, and those whose defaults come from torch or from the class they derive from.
ONLY_HERE = (
    "activation_checkpointing.", "amp.", "bf16.", "checkpoint.verify_checksums", "communication_compression.",
    "batch_invariant", "compile.activation_memory_budget", "deterministic",
    "data_efficiency.", "elasticity.", "expert_parallel.dispatch_dtype", "float8.", "max_consecutive_skipped_steps",
    "optimizer.params[", "pipeline.", "preemption.", "quantize_training.", "run_report.", "sequence_parallel.",
    "sparse_attention.apply_to", "tensor_parallel.", "trace.", "eigenvalue.model_name", "zero_optimization.agreement",
    "zero_optimization.exact_sums", "zero_optimization.offload_optimizer.update",
)  # fmt: skip


def _flat(model: type[Section], prefix: str) -> dict[str, Any]:
    found = {}
    for entry in entries(model):
        if entry.nested is None:
            value = REQUIRED if entry.field.is_required() else default_of(entry.field)
            found[prefix + ".".join(map(str, entry.path))] = value
    return found


def _ours() -> dict[str, Any]:
    found = _flat(Root, "")
    for section, models in (("optimizer", OWN_OPTIMIZERS), ("scheduler", OWN_SCHEDULERS)):
        for name, model in models.items():
            found |= _flat(model, f"{section}.params[{name}].")
    return found


def _original() -> dict[str, Any]:
    return {f"{section}.{key}".lstrip("."): value for section, keys in ORIGINAL.items() for key, value in keys.items()}


def _rows(heading: str) -> dict[str, list[str]]:
    """The rows of a table on the page, by key."""
    text = PAGE.read_text().partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_every_key_of_the_original_exists_here() -> None:
    assert not set(_original()) - set(_ours())


def test_other_defaults_are_on_the_page_with_a_reason() -> None:
    ours, original, rows = _ours(), _original(), _rows("Other values")
    null = _rows("null that means something else")
    differing = {key for key, value in original.items() if ours[key] != value}
    assert set(rows) == differing - set(null)
    for key, (theirs, here, reason) in rows.items():
        assert [theirs, here] == [f"`{json.dumps(value)}`" for value in (original[key], ours[key])] and len(reason) > 10


def test_the_command_knows_what_differs() -> None:
    listed = {*_rows("Other values"), *_rows("null that means something else")}
    assert set(OTHER_DEFAULTS) == listed


def test_null_is_explained() -> None:
    for key in _rows("null that means something else"):
        *sections, name = key.split(".")
        model: Any = Root
        for section in sections:
            model = model.model_fields[section].annotation
        assert _original()[key] is None and facts_of(model.model_fields[name]).null_means, key


def test_keys_that_the_original_gives_no_default_are_off_or_only_here() -> None:
    others = {key: value for key, value in _ours().items() if key not in _original()}
    given = {key for key, value in others.items() if value and value != REQUIRED}
    assert not {key for key in given if not key.startswith(ONLY_HERE)}
    assert all(any(key.startswith(prefix) for key in others) for prefix in ONLY_HERE)
