"""The example of tensor parallelism prints the table that its page shows, and trains."""

import pytest

from tests.examples.support import ROOT, Desk


@pytest.mark.slow
def test_a_llama_on_four_ranks(tmp_path):
    pytest.importorskip("transformers")
    desk = Desk(tmp_path, "quickstart")
    text = desk.run("torchrun --nproc-per-node 4 ../tensor_parallel.py --tensor 2 --stage 3 --steps 5 2>&1")
    page = (ROOT / "docs/guide/tensor-parallelism.md").read_text()
    table = page.split("tensor parallelism over 2 ranks:\n")[1].split("```")[0]
    assert table in text and "step 5: loss" in text
