"""Loads of experts: numbers, monitor events, the picture; and both ways of computing stacked experts."""

import csv
import xml.dom.minidom
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from deepspeed.moe.layer import MoE
from deepspeed.parallel.expert import spread as spread_module
from deepspeed.parallel.expert.feature import expert_balances, expert_events, save_loads_picture
from deepspeed.parallel.expert.spread import Spread, is_stack, spread
from tests.engine.support import engine_of
from tests.harness import run_ranks
from tests.parallel.expert.models import batch, build
from tests.parallel.expert.test_layer import Net, tokens


def test_numbers_and_picture(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = MoE(4, torch.nn.Linear(4, 4), 3, k=1, capacity_factor=0.5, min_capacity=0, use_rts=False)
    assert expert_balances(layer) == {} and expert_events(layer) == []
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.zero_()  # all to the first expert, which takes 1 of 6
    layer(torch.randn(6, 4))
    (balance,) = expert_balances(layer).values()
    assert (balance.counts, balance.load, balance.dropped) == ((1, 0, 0), (1, 0, 0), 5)
    assert balance.imbalance == 3.0 and balance.dropped_share == pytest.approx(5 / 6)
    assert dict(expert_events(layer))["experts/0/load_percent_0"] == 100.0
    save_loads_picture(layer, tmp_path / "loads.svg")
    drawn = xml.dom.minidom.parse(str(tmp_path / "loads.svg"))
    assert len(drawn.getElementsByTagName("title")) == 3


def _monitored(folder: str) -> None:
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    engine = engine_of(Net((1, 1)), 1, **monitor)
    engine.backward(engine(tokens(0, 0, 0)))
    engine.step()
    engine.destroy()


def test_events_reach_the_monitors(tmp_path: Path) -> None:
    run_ranks(_monitored, 1, str(tmp_path))
    found = {path.name for path in tmp_path.rglob("*.csv")}
    names = [name for name in found if "imbalance" in name]
    assert len(names) == 2, found
    rows = list(csv.reader(next(path for path in tmp_path.rglob("*.csv") if path.name == names[0]).open()))
    assert float(rows[-1][1]) >= 1.0


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "llama4"])
def test_grouped_products_equal_the_loop(kind: str) -> None:
    """The way that CUDA devices of capability 9 take, on the host, where torch has it too."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    results = []
    for grouped in (False, True):
        model = build(kind, intermediate_size=16)
        for module in model.modules():
            if is_stack(module):
                spread(module, Spread.of(module, 1))
        with patch.object(spread_module, "uses_grouped", lambda *_weights, grouped=grouped: grouped):
            loss = model(**batch(0, 0)).loss
            loss.backward()
        results.append((loss, [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)
