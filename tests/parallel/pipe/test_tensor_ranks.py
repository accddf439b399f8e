"""Stages beside ranks that share layers: embedding and head are cut, norms work on parts of the tokens."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import deepspeed
from deepspeed.comm.base.counters import traffic
from deepspeed.errors import DeepSpeedConfigError, PipelineError
from deepspeed.parallel.pipe.transformers_models import transformers_names
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from tests.harness import on_ranks
from tests.harness.pool import run_ranks
from tests.parallel.tensor.support import VOCABULARY, adamw, assert_weights_equal, ids, llama, plain_run

COUNT, LENGTH, STEPS = 3, 8, 3
WIDTH = 24


def _loss(model: Any, step: int, data: int) -> torch.Tensor:
    batch = ids(step, data, LENGTH)
    return model(input_ids=batch, labels=batch).loss


def _model(**changes: Any) -> nn.Module:
    return llama(num_hidden_layers=3, **changes)


def _engine(pipe: int, tensor: int, data: int, *, stage: int = 1, model: Any = None, more: Any = None, **cut: Any):
    topology = PipeModelDataParallelTopology(num_pp=pipe, num_mp=tensor, num_dp=data)
    module = PipelineModule.from_transformers(model or _model(), topology=topology, **(more or {}))
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
        **({"tensor_parallel": {"autotp_size": tensor, **cut}} if tensor > 1 else {}),
    }
    return deepspeed.initialize(model=module, optimizer=adamw(module.parameters()), config=config)[0]


def _items(step: int, data: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(batch := ids(10 * step + micro, data, LENGTH), batch) for micro in range(COUNT)]


def _cell(pipe: int, tensor: int, data: int, kwargs: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Losses and norms of a few steps, and this rank's weights by the model's names."""
    engine = _engine(pipe, tensor, data, **kwargs)
    if kwargs.get("more", {}).get("partition_method") == "plan":
        first, inner, last = engine.module.parts  # cut by cost: the stages have different numbers of layers
        assert inner - first != last - inner
    names = transformers_names(engine.module._layer_specs)
    found = []
    for step in range(STEPS):
        loss = engine.train_batch(iter(_items(step, engine.grid.data_parallel_id)))
        found.append((loss.item(), engine.get_global_grad_norm()))
    weights = {}
    for own, value in engine.iter_full("fp32"):
        beginning = next(one for one in names if own.startswith(one))
        weights[names[beginning] + own.removeprefix(beginning)] = value.clone()
    engine.destroy()
    return found, weights


def _run(pipe: int, tensor: int, data: int, cells: list[dict[str, Any]]) -> None:
    """Of a model whose head is tied, the last cell only."""
    for tied, number in ((False, 0), (True, -1)):
        make = {"tie_word_embeddings": tied}
        expected = plain_run(_model(**make), STEPS, data, COUNT, loss=_loss)
        for kwargs in cells[number:]:
            found, weights = _cell(pipe, tensor, data, {**kwargs, "model": _model(**make)})
            for (loss, norm), wanted, wanted_norm in zip(found, expected.losses, expected.norms, strict=True):
                assert loss == pytest.approx(wanted, rel=1e-5), (tied, kwargs)
                assert norm == pytest.approx(wanted_norm, rel=1e-5), (tied, kwargs)
            wanted_weights = {name: expected.state[name] for name in weights}
            assert_weights_equal(weights, wanted_weights)


CUT = {"sequence_parallel_norms": True}
WHOLE_CUT = {**CUT, "vocab_parallel_lm_head": True}


def test_like_plain_torch():
    run_ranks(_run, 4, 2, 2, 1, [{}, {**WHOLE_CUT, "more": {"partition_method": "plan"}}], timeout=200)


@pytest.mark.slow
def test_like_plain_torch_on_every_axis():
    cells = [{**CUT, "stage": 1}] + [
        {**WHOLE_CUT, "stage": stage, "more": {"schedule": schedule, "activation_checkpoint_interval": n}}
        for stage, schedule, n in ((0, "1f1b", 0), (1, "interleaved", 1), (2, "zb-h1", 0), (3, "gpipe", 0))
    ]
    run_ranks(_run, 8, 2, 2, 2, cells, timeout=400)


def _count(cells: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Of one step: operations of products, bytes to the other stage, elements of all parameters."""
    found = []
    for kwargs in cells:
        engine = _engine(2, 2, 1, **kwargs)
        engine.train_batch(iter(_items(0, 0)))
        before = traffic.requested_along["send", "pipe"].nbytes
        with FlopCounterMode(display=False) as counter:
            engine.train_batch(iter(_items(1, 0)))
        sent = traffic.requested_along["send", "pipe"].nbytes - before
        elements = sum(parameter.numel() for parameter in engine.module.parameters())
        found.append((counter.get_total_flops(), sent, elements))
        engine.destroy()
    return found


SKIP = {
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*\.(q|k|v|gate|up)_proj\.weight"], "partition_type": "column"},
            {"patterns": [r".*\.(o|down)_proj\.weight"], "partition_type": "row"},
        ],
    }
}
"""Cuts blocks as the model's plan does, and leaves embedding and head whole."""


def test_elements_operations_and_bytes():
    bounds = {"more": {"partition_method": [0, 3, 7]}}
    ranks = run_ranks(_count, 4, [{**bounds, **SKIP}, bounds, {**bounds, **CUT}])
    for rank, (whole, cut, norms) in enumerate(ranks):
        rows = (VOCABULARY + 1) // 2 - rank % 2  # 34 and 33 of 67
        assert whole[2] - cut[2] == (VOCABULARY - rows) * WIDTH  # embedding on the first stage, head on the second
        is_last = rank >= 2
        tokens = COUNT * 2 * LENGTH
        assert whole[0] - cut[0] == is_last * 3 * 2 * tokens * WIDTH * (VOCABULARY - rows)
        assert norms[2] == cut[2]
        hidden = tokens * WIDTH * 4  # what differs between two messages of a stage: half of the hidden states
        assert cut[1] - norms[1] == hidden // 2


@on_ranks(4)
def test_what_cannot_be_cut_is_refused_on_every_stage() -> None:
    with pytest.raises(DeepSpeedConfigError, match="expected row-parallel layers in each of them and nowhere else"):
        skip = {"patterns": [r"(3|5)\..*\.weight"], "partition_type": "skip"}  # a block, and the last norm
        specs = [skip, *SKIP["partition_config"]["layer_specs"]]
        _engine(2, 2, 1, **CUT, partition_config={"use_default_specs": False, "layer_specs": specs})
    embedding = {"patterns": [r"0\..*\.weight"], "partition_type": "skip"}  # only the first stage has it
    specs = [embedding, *SKIP["partition_config"]["layer_specs"]]
    _engine(2, 2, 1, partition_config={"use_default_specs": False, "layer_specs": specs}).destroy()
    specs.append({"patterns": [r".*mystery.*"], "partition_type": "skip"})
    with pytest.raises(DeepSpeedConfigError, match=r"layer_specs\[3\]: '.*mystery.*' fits no weight"):
        _engine(2, 2, 1, partition_config={"use_default_specs": False, "layer_specs": specs})
    engine = _engine(2, 2, 1, **CUT)
    odd = ids(0, 0, LENGTH + 1)
    with pytest.raises(PipelineError, match="has 9 positions, which 2 ranks do not divide; pad batches to a multiple"):
        engine.eval_batch(iter([(odd, odd)] * COUNT))
