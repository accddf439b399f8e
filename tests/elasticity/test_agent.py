"""``DSElasticAgent``: torch's agent restarts workers, and a run that failed is an error."""

import inspect
import os
import re

import pytest
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from deepspeed.elasticity import DSElasticAgent, elastic_agent, is_torch_elastic_compatible
from deepspeed.ports import free_port


def agent(folder, script):
    meeting = RendezvousParameters("c10d", f"127.0.0.1:{free_port()}", "run", 1, 1, is_host=True)
    spec = WorkerSpec(
        "default", 2, get_rendezvous_handler(meeting), entrypoint="/bin/sh", args=("-c", script), max_restarts=1,
        monitor_interval=0.02, local_addr="127.0.0.1",
    )  # fmt: skip
    return DSElasticAgent(spec, {"FOLDER": str(folder), "COUNT": 3})


def test_workers_are_started_again_in_the_environment_of_the_run(tmp_path):
    script = 'try=$TORCHELASTIC_RESTART_COUNT; touch "$FOLDER/$RANK-$WORLD_SIZE-$COUNT-$try"; exit $((1 - try))'
    result = agent(tmp_path, script).run()
    assert not result.is_failed()
    assert {"0-2-3-1", "1-2-3-1"} <= {path.name for path in tmp_path.iterdir()}
    assert "FOLDER" not in os.environ


def test_a_run_that_failed_is_an_error(tmp_path):
    with pytest.raises(ChildFailedError, match="exitcode  : 3"):
        agent(tmp_path, "exit 3").run()


def test_only_public_names_of_torch_are_used():
    assert is_torch_elastic_compatible()
    source = inspect.getsource(elastic_agent)
    words = re.findall(r"(?:import |\.)(_[a-z]\w+)", source)
    assert words == [], "names of torch that begin with an underscore change between its releases"
