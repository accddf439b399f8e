"""Weights to a server, in its protocol: names, order and bytes; servers that die, refuse or are late."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import CallOrderError, CommunicationError, DeepSpeedConfigError
from deepspeed.rollout import ServerClient
from tests.harness import run_ranks
from tests.rollout.stand_in_server import StandInServer

LIMIT = 1.5  # seconds, of servers that are late
UPDATE = ["/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
START = ["/get_world_size", "/init_weight_transfer_engine"]
SGLANG = ["/pause_generation", "/update_weights_from_distributed", "/continue_generation"]
SERVERS = {  # settings of the server and of its client, and the calls of two updates
    "packed": ({"workers": 2}, {"packed_buffer_size_bytes": 250}, [*START, *UPDATE, *UPDATE]),
    "before 0.28": ({"old": True}, {}, [*START, START[1], *UPDATE, *UPDATE]),
    "shared": (
        {},
        {"transport": "shared_memory", "packed_buffer_size_bytes": 250},
        [START[1], *2 * [*UPDATE[:2], *3 * UPDATE[2:3], *UPDATE[3:]]],
    ),
    "sglang": ({"workers": 2}, {"protocol": "sglang"}, [START[0], "/init_weights_update_group", *SGLANG, *SGLANG]),
}
FAILURES = {
    "no server": (None, "http://127.0.0.1:9/init_weight_transfer_engine"),
    "refused at the start": ({"/init_weight_transfer_engine": "refuse"}, "found 503 with 'not now please'"),
    "late at the start": ({"/init_weight_transfer_engine": "late"}, f"no answer within {LIMIT} s"),
    "refused": ({"/start_weight_update": "refuse"}, "/start_weight_update: expected status 200"),
    "died": ({"/update_weights": "die"}, "/update_weights: no answer"),
    "late": ({"/update_weights": "late"}, f"/update_weights: no answer within {LIMIT} s"),
}


def _engine():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8, bias=False))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def _update(engine, step):
    torch.manual_seed(step + 10 * dist.get_rank())
    engine.backward(engine(torch.randn(4, 8, dtype=torch.bfloat16)).square().mean())
    engine.step()


def _rows(engine):
    return [
        (name, str(value.dtype)[6:], tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, value in engine.export_weights()
    ]


def _send_to_all(urls):
    """Sends two updates to each server; returns what each should have received."""
    engine = _engine()
    clients = {
        name: ServerClient(engine, urls[name], **{"transport": "gloo", "timeout": 60, **SERVERS[name][1]})
        for name in SERVERS
    }
    sent = []
    for step in range(2):
        _update(engine, step)
        sent += _rows(engine)
        for client in clients.values():
            client.send()
    clients["packed"].close()
    with pytest.raises(CallOrderError, match="closed"):
        clients["packed"].send()
    for wrong in (
        {"transport": "tcp"},
        {"transport": "nccl"},
        {"transport": "shared_memory", "protocol": "sglang"},
        {"protocol": "http"},
        {"url": "127.0.0.1:8000"},
        {"timeout": 0},
    ):
        with pytest.raises(DeepSpeedConfigError, match="ServerClient"):
            ServerClient(engine, **{"url": "http://127.0.0.1:9", "transport": "gloo", **wrong})
    engine.destroy()
    return sent


def test_servers_receive_every_tensor_in_order():
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(StandInServer(**how)) for name, (how, _, _) in SERVERS.items()}
        sent, nothing = run_ranks(_send_to_all, 2, {name: server.url for name, server in servers.items()})
        assert len(sent) == 2 * 8 and nothing == []
        for name, server in servers.items():
            assert server.calls == SERVERS[name][2], name
            assert server.received == sent, name
        for name in ("packed", "shared"):
            assert len(servers[name].buffers) == 6 and min(servers[name].buffers[:2]) > 250


def _survive(urls, good):
    """Returns the messages and seconds of the clients whose servers fail, after which training must go on as ever."""
    engine, twin = _engine(), _engine()
    found = {}
    for step, (name, url) in enumerate(urls.items()):
        _update(engine, step)
        _update(twin, step)
        began = time.monotonic()
        with pytest.raises(CommunicationError) as caught:
            ServerClient(engine, url, transport="gloo", timeout=LIMIT, packed_buffer_size_bytes=100).send()
        found[name] = (str(caught.value), time.monotonic() - began)
    client = ServerClient(engine, good, transport="gloo", timeout=60)
    client.send()
    _update(engine, 99)
    _update(twin, 99)
    client.send()
    assert _rows(engine) == _rows(twin)
    for each in (engine, twin):
        each.destroy()
    return found


def test_a_failing_server_is_the_same_error_on_every_rank_and_training_goes_on():
    with contextlib.ExitStack() as stack:
        urls = {"no server": "http://127.0.0.1:9"}
        for name, (fails, _) in FAILURES.items():
            if fails is not None:
                urls[name] = stack.enter_context(StandInServer(fails=fails)).url
        good = stack.enter_context(StandInServer())
        first, second = run_ranks(_survive, 2, urls, good.url)
        assert len(good.received) == 16
    for name, (_, message) in FAILURES.items():
        text, seconds = first[name]
        expected = message.replace("init_weight_transfer_engine", "get_world_size") if name == "no server" else message
        assert text == second[name][0] and "\n" not in text and urls[name] in text and expected in text
        assert max(seconds, second[name][1]) < LIMIT + 8, name
