"""from_pretrained at ZeRO stage 3 loads what stage 0 loads: every family of the installed Transformers (slow)."""

from __future__ import annotations

import copy
import itertools
import shutil

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.zero.construction import pretrained as models
from tests.zero.construction.families import small_families
from tests.zero.construction.test_init import full_values

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def _difference(kind, place):
    """What stage 3 has otherwise than stage 0, or None; "unloadable" where stage 0 raises."""
    try:
        plain, found = kind.from_pretrained(place, output_loading_info=True)
    except Exception:  # of the library, about a configuration that was made small
        return "unloadable"
    with models.zero3_switched_on(models.auto_config()):
        sharded, info = kind.from_pretrained(place, output_loading_info=True)
    if info != found:
        return f"{info} instead of {found}"
    values, expected = full_values(sharded), dict(plain.named_parameters(remove_duplicate=False))
    if values.keys() != expected.keys():
        return f"other names: {sorted(values.keys() ^ expected.keys())}"
    loaded = expected.keys() - set(found["missing_keys"])
    wrong = [n for n in loaded if values[n].dtype != expected[n].dtype or not torch.equal(values[n], expected[n])]
    buffers = zip(plain.named_buffers(), sharded.named_buffers(), strict=True)
    wrong += [name for (name, one), (_, other) in buffers if not torch.equal(one.nan_to_num(), other.nan_to_num())]
    return f"other values: {sorted(wrong)}" if wrong else None


def _compared(folder, most):
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    outcome = {}
    for name, kind, config in itertools.islice(small_families(), most):
        place = f"{folder}/{name}"
        problem = None
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            try:
                kind(copy.deepcopy(config)).save_pretrained(place, max_shard_size="300KB")
            except Exception:
                problem = "unsaveable"
        problems = [problem]
        dist.broadcast_object_list(problems, 0)
        outcome[name] = problems[0] or _difference(kind, place)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
    return outcome


@pytest.mark.slow
def test_every_family_loads_as_at_stage_0(tmp_path):
    for outcome in run_ranks(_compared, 2, str(tmp_path), None, timeout=3600):
        wrong = {name: words for name, words in outcome.items() if words not in (None, "unloadable", "unsaveable")}
        assert not wrong
        assert sum(words is None for words in outcome.values()) >= 100, outcome
