"""The example of a trainer and a served copy prints how far their log-probabilities are apart."""

import re

import pytest

from tests.examples.support import Desk


@pytest.mark.slow
@pytest.mark.parametrize(("options", "bound"), [("", 1e-4), ("--stage 1 --bf16", 0.2)])
def test_the_gap_is_small(tmp_path, options, bound):
    pytest.importorskip("transformers")
    desk = Desk(tmp_path, "quickstart")
    text = desk.run(f"torchrun --nproc-per-node 2 ../trainer_and_server.py {options} 2>&1")
    gaps = re.findall(r"step \d: 21 tensors, log-probability gap mean \S+ max (\S+)", text)
    assert len(gaps) == 3 and all(float(gap) < bound for gap in gaps), text
