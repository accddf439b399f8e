"""Machines that each run one command: which of them this is, by the variables of a cluster."""

from __future__ import annotations

import pytest

from deepspeed.cluster import ClusterNode, expand_nodelist, find_cluster_node
from deepspeed.comm.base.environment import find_place
from deepspeed.errors import CommunicationError

PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
SKY = {
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n10.0.0.9\n",
    "SKYPILOT_NODE_RANK": "2",
    "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    "SKYPILOT_TASK_ID": "sky-1",
}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1", "algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "1",
    "TRAINING_JOB_NAME": "job-1",
}


def test_every_cluster_identifies_this_machine():
    source = "PET_* variables of a torch runtime"
    assert find_cluster_node(PET) == ClusterNode(1, 2, 1, "job-node-0-0.job", 29400, (), source)
    sky = find_cluster_node(SKY)
    assert (sky.index, sky.count, sky.devices, sky.address) == (2, 3, 1, "10.0.0.7")
    assert sky.hosts == ("10.0.0.7", "10.0.0.8", "10.0.0.9")
    sagemaker = find_cluster_node(SAGEMAKER)
    assert (sagemaker.index, sagemaker.count, sagemaker.address, sagemaker.port) == (1, 2, "algo-1", None)


def test_one_machine_is_no_cluster():
    assert find_cluster_node({}) is None
    assert find_cluster_node({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"}) is None
    assert find_cluster_node({**SKY, "SKYPILOT_NODE_IPS": "10.0.0.7", "SKYPILOT_NODE_RANK": "0"}) is None
    assert find_cluster_node({**SKY, "SKYPILOT_NODE_IPS": " "}) is None
    assert find_cluster_node({**SAGEMAKER, "SM_HOSTS": '["algo-2"]'}) is None


@pytest.mark.parametrize("devices", ["0", "", "auto"])
def test_an_unusable_number_of_devices_is_none(devices):
    for environ, name in ((PET, "PET_NPROC_PER_NODE"), (SKY, "SKYPILOT_NUM_GPUS_PER_NODE"), (SAGEMAKER, "SM_NUM_GPUS")):
        if not (environ is PET and devices == "0"):
            assert find_cluster_node({**environ, name: devices}).devices is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**PET, "PET_NNODES": "1:4"}, "PET_NNODES=1:4 lets the number of machines change"),
        ({**PET, "PET_NODE_RANK": "2"}, "machine 2 of 2: expected a number from 0 to 1"),
        ({**PET, "PET_NODE_RANK": "first"}, "PET_NODE_RANK: expected a whole number, found 'first'"),
        ({**PET, "PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR is not set"),
        ({**SAGEMAKER, "SM_HOSTS": "algo-1"}, "SM_HOSTS: expected a JSON list of names, found 'algo-1'"),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST 'algo-3' is not among SM_HOSTS"),
        ({**SKY, "SKYPILOT_NODE_RANK": ""}, "SKYPILOT_NODE_RANK is not set"),
    ],
)
def test_variables_that_make_no_sense(environ, message):
    with pytest.raises(CommunicationError, match=message):
        find_cluster_node(environ)


def test_plain_python_on_each_machine_is_a_rank():
    for environ, expected in (
        (PET, (1, 2, 0, "job-node-0-0.job", 29400, "")),
        (SKY, (2, 3, 0, "10.0.0.7", 29500, "SkyPilot's variables, run sky-1")),
        (SAGEMAKER, (1, 2, 0, "algo-1", 29500, "SageMaker's variables, run job-1")),
    ):
        place = find_place(environ)
        assert (place.rank, place.world_size, place.local_rank, place.address, place.port, place.run) == expected
        assert find_place({**environ, "MASTER_ADDR": "h", "MASTER_PORT": "7"}).address == "h"
        assert find_place(environ, discover=False).world_size == 1


def test_who_starts_ranks_counts_more_than_the_cluster():
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "TORCHELASTIC_RUN_ID": "x"}
    assert find_place({**SKY, **torchrun}).source == "torchrun variables"
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert find_place({**PET, **mpi, "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).source == "Open MPI variables"


@pytest.mark.parametrize(
    ("environ", "count"), [({**PET, "PET_NPROC_PER_NODE": "4"}, 0), ({**PET, "PET_NPROC_PER_NODE": "gpu"}, 4)]
)
def test_machines_with_several_ranks_need_a_launcher(environ, count):
    with pytest.raises(CommunicationError, match="each with 4 ranks, but plain `python` starts one"):
        find_place(environ, device_count=count)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[003-005,9],login1", ["gpu003", "gpu004", "gpu005", "gpu9", "login1"]),
        ("gpu[7,9-10]", ["gpu7", "gpu9", "gpu10"]),
        ("n-1-[10-11].cluster,x[1-2]", ["n-1-10.cluster", "n-1-11.cluster", "x1", "x2"]),
        ("a[1-2]b[08-09]-ib", ["a1b08-ib", "a1b09-ib", "a2b08-ib", "a2b09-ib"]),
    ],
)
def test_node_lists(text, hosts):
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize("text", ["", "gpu[x]", "gpu[1-]", "gpu[1"])
def test_bad_node_lists(text):
    with pytest.raises(CommunicationError, match="node list"):
        expand_nodelist(text)
