"""Code gets its job as an argument; only public functions and layers of the program ask which one there is."""

import re

from tests.project import graph

ASKS = re.compile(r"\bJob\.(?:current|adopt)\(\)")
MOST, MOST_OUTSIDE_COMM = 28, 7


def _calls() -> list[str]:
    """Returns module and line of each call."""
    return [
        f"{module}:{number}"
        for module, path in graph.modules().items()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for _ in ASKS.findall(line)
    ]


def test_few_calls_ask_for_the_current_job():
    calls = _calls()
    outside = [call for call in calls if not call.startswith("deepspeed.comm.")]
    advice = "take the job as an argument (EngineSetup.job), or an Axis of it:\n"
    assert 0 < len(calls) <= MOST, f"{len(calls)} calls; {advice}" + "\n".join(calls)
    assert len(outside) <= MOST_OUTSIDE_COMM, f"{len(outside)} calls outside comm; {advice}" + "\n".join(outside)
