"""Plans along the tensor and the sequence axis against real ranks, of a model by its sizes and one of Transformers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.cli.plan import main
from deepspeed.comm.job.mesh import Mesh
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.tensor.batches import WORDS
from deepspeed.plan.decoder import Decoder
from tests.ecosystem.support import needs_transformers
from tests.harness import run_ranks
from tests.plan.along import assert_as_counted, count_step
from tests.plan.cells import SHAPE, TOKENS, Cell

RANKS = 4
ASIDE = {1: 0, 2: 8 * WORDS, 4: 8 * WORDS}
"""By ranks that share layers, the table by which they compare their batches."""


def _config(cell: Cell, tensor: int, sequence: int) -> dict[str, Any]:
    config = cell.config("")
    more = {"autotp_size": tensor if tensor > 1 else 0, "verify": False}
    tensor_parallel = {**config.get("tensor_parallel", {}), **more}
    return {**config, "tensor_parallel": tensor_parallel, "sequence_parallel_size": sequence}


def _planned(cell: Cell, tensor: int, sequence: int, **more: Any) -> Any:
    given = {
        "devices_per_node": RANKS,
        "device": "cpu",
        "device_memory": "8GiB",
        "sequence_length": TOKENS,
        "compare_checkpointing": False,
        "tensor": tensor,
        "sequence": sequence,
        **more,
    }
    return deepspeed.plan(given.pop("model", SHAPE), cell.config(""), **given)


def _measure(cells: list[tuple[Cell, int, int]]) -> list[dict[str, Any]]:
    found = []
    for cell, tensor, sequence in cells:
        torch.manual_seed(0)
        found.append(count_step(Decoder(SHAPE), _config(cell, tensor, sequence), TOKENS // sequence))
    return found


def _compare(cells: list[tuple[Cell, int, int]]) -> None:
    real = run_ranks(_measure, RANKS, cells, timeout=240)
    for number, cell in enumerate(cells):
        rank = 2  # the first of the second tensor group, or of the second group that shares a sequence
        assert_as_counted(_planned(*cell, rank=rank), real[rank][number], cell, aside=ASIDE[cell[1]])


def test_against_real_ranks():
    shared = [Cell(3, zero=((key, 2),)) for key in ("mics_shard_size", "zero_hpz_partition_size")]
    _compare([(Cell(1, accumulation=2), 2, 1), (Cell(3), 2, 2), *((cell, 1, 2) for cell in shared)])


@pytest.mark.slow
def test_against_real_ranks_at_every_stage():
    sizes = [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    _compare([(Cell(stage, accumulation=2), *size) for stage in range(4) for size in sizes])


def test_what_is_sent_is_the_formula():
    hidden, kv = SHAPE.hidden, SHAPE.hidden // 2
    plain = _planned(Cell(1), 1, 1)
    for sequence in (2, 4):
        # Queries, keys, values and the result, in forward and in backward: what a rank does not keep.
        _, nbytes = _planned(Cell(1), 1, sequence).simulated.flow.requested_along["all_to_all", "sequence"]
        heads = max(kv, SHAPE.hidden // SHAPE.heads * sequence)  # a key head is sent to every rank that needs it
        rows = 2 * TOKENS // sequence * 2 * (sequence - 1) // sequence
        assert nbytes == SHAPE.layers * 2 * rows * (2 * hidden + 2 * heads)
    for tensor in (2, 4):
        plan = _planned(Cell(1), tensor, 1)
        # Two sums per block each way, and the gradient of the head's input; an all-reduce counts twice.
        at_least = (4 * SHAPE.layers + 1) * 2 * (2 * TOKENS * hidden * 2)
        assert plan.simulated.flow.requested_along["all_reduce", "tensor"][1] >= at_least
        assert plan.mesh.size("tensor") == tensor and plan.parameters == plain.parameters
        assert plan.device_bytes < plain.device_bytes
    assert _planned(Cell(1), 1, 4).simulated.activations == pytest.approx(plain.simulated.activations / 4, rel=0.05)


def test_all_axes_at_once():
    plan = _planned(Cell(1, accumulation=4), 2, 2, pipe=2, devices_per_node=8, nodes=2)
    assert plan.mesh == Mesh((("pipe", 2), ("data", 2), ("sequence", 2), ("tensor", 2)))
    axes = {row.axis for row in plan.transfers}
    assert axes == {"pipe", "data", "sequence", "tensor"}
    assert all(row.between == 0 for row in plan.transfers if row.axis in ("tensor", "sequence", "data"))
    assert all(row.inside == 0 for row in plan.transfers if row.axis == "pipe")  # one stage per node


def test_a_sweep_finds_the_shape(capsys):
    model = ["--layers", "4", "--hidden", "64", "--heads", "4", "--vocab", "256", "--sequence-length", "64"]
    assert main([*model, "--devices", "4", "--sweep", "pipe=1,2", "tensor=1,2,3", "sequence=1,2"]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.count("yes") == 7
        and printed.count("refused") == 5
        and "autotp_size 3 takes groups of 3" in " ".join(printed.split())
    )


def _llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
    return transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)


_CUT_NORMS = Cell(3, more=(("tensor_parallel", {"sequence_parallel_norms": True}),))


def _measure_llama(cell: Cell, tensor: int, sequence: int) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    tokens = TOKENS // sequence
    first = None if sequence == 1 else dist.get_rank() // tensor % sequence * tokens
    model = LlamaForCausalLM(_llama()).train()
    return count_step(model, _config(cell, tensor, sequence), tokens, positions=first)


@needs_transformers
def test_a_model_of_transformers():
    for cell in [(Cell(3), 1, 2), (_CUT_NORMS, 2, 1)]:
        # A job each: once ranks shared a sequence in a job, no rank waits for reductions inside a backward there.
        real = run_ranks(_measure_llama, RANKS, *cell, timeout=240)
        found = _planned(*cell, rank=2, model=_llama())
        assert_as_counted(found, real[2], cell, aside=ASIDE[cell[1]])


def test_the_longest_sequence_that_fits(capsys):
    given = {"device": "other", "device_memory": "256MiB", "devices_per_node": RANKS, "longest": True}
    found = {}
    for sequence in (1, 2, 4):
        plan = deepspeed.plan(SHAPE, Cell(3).config(""), sequence=sequence, **given)
        found[sequence] = plan.request.sequence_length
        assert plan.fits and found[sequence] % 1024 == 0
        longer = {**given, "longest": False, "sequence_length": found[sequence] + 1024, "compare_checkpointing": False}
        assert not deepspeed.plan(SHAPE, Cell(3).config(""), sequence=sequence, suggest=False, **longer).fits
    # Activations per rank fall as 1 / sp, and what does not is small here.
    assert found[2] == pytest.approx(2 * found[1], rel=0.3) and found[4] == pytest.approx(4 * found[1], rel=0.3)
    with pytest.raises(DeepSpeedConfigError, match="not even 1,024 tokens fit"):
        deepspeed.plan(SHAPE, Cell(0).config(""), **{**given, "device_memory": "1MiB"})
    model = ["--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "256", "--longest"]
    where = ["--device", "other", "--device-memory", "64MiB", "--devices", "2"]
    assert main([*model, *where, "--sweep", "sequence=1,2"]) == 0
    assert "tokens" in capsys.readouterr().out
