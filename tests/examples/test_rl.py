"""The examples of reinforcement learning end with a reward that is better than the first one."""

import re

import pytest

from tests.examples.support import EXAMPLES, Desk

FILES = ("grpo", "ppo", "dpo", "distillation", "grpo_server --per-layer")
REWARD = re.compile(r"reward (-?\d+\.\d+) -> (-?\d+\.\d+)")


def test_they_are_short():
    for name in FILES:
        assert len((EXAMPLES / "rl" / f"{name.split()[0]}.py").read_text(encoding="utf-8").splitlines()) <= 120, name


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_reward_grows(tmp_path, name):
    pytest.importorskip("transformers")
    script, _, options = name.partition(" ")
    desk = Desk(tmp_path, "rl")
    text = desk.run(f"torchrun --nproc-per-node 2 {script}.py {options} --report run 2>&1")
    first, last = map(float, REWARD.fullmatch(text.strip().splitlines()[-1]).groups())
    assert last - first > 0.05 * abs(first), text
    assert "sleep: freed_bytes" in (desk.folder / "run" / "report.html").read_text(encoding="utf-8")
    if options:
        gaps = re.findall(r"^(?:greatest gap of log-probabilities|layer \d) (\S+)$", text, re.MULTILINE)
        assert len(gaps) == 3 and all(float(gap) < 1e-4 for gap in gaps), text
