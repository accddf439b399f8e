"""Sends the weights of an engine to an inference server in the server's own protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Literal
from urllib.parse import urlsplit

import torch

from deepspeed.checkpoint.exchange import Exchange
from deepspeed.checkpoint.weight_formats import WeightInfo
from deepspeed.comm.transports.weight_channel import (
    GROUP,
    TorchChannel,
    VllmNcclChannel,
    WeightChannel,
    require_vllm,
)
from deepspeed.errors import CallOrderError, CommunicationError, DeepSpeedConfigError
from deepspeed.ports import address_towards
from deepspeed.rollout.server_call import DaemonThread, ServerCall, ServerFailure

Weights = Iterator[tuple[str, torch.Tensor]]

_DOING = "weights for a server"
_PACKED_BUFFERS = 2  # one is filled while the other is sent


class ServerClient:
    """Sends the weights of an engine to an inference server.

    Every rank makes it and calls its methods; rank 0 alone talks to the server, over HTTP and, for the weights, a group
    of its own with the server's workers. If the server dies, answers with another status than 200 or is late, every
    rank raises the same error. The engine is not changed by that: train on, and make a new client for a new server.

    Args:
        engine: Made by ``deepspeed.initialize``.
        url: Address of the server, such as ``http://host:8000``.
        transport: ``"nccl"`` (GPUs; with vLLM its package is needed here), ``"gloo"``, or ``"shared_memory"`` for a
            vLLM server on the machine of rank 0.
        protocol: ``"vllm"`` (the calls of release 0.28; a server that refuses ``packed`` at the start gets it with each
            update, as before 0.28) or ``"sglang"``.
        timeout: Seconds that the server may take for each call. The call that receives the weights lasts as long as
            their export.
        packed_buffer_size_bytes: Tensors are sent together until there are more bytes than this. The trainer holds two
            such buffers, besides what ``export_weights`` holds.

    Raises:
        DeepSpeedConfigError: A value cannot be used here.
        CommunicationError: The server died, refused or was late; on every rank.
    """

    def __init__(
        self,
        engine: Any,
        url: str,
        transport: Literal["nccl", "gloo", "shared_memory"] = "nccl",
        protocol: Literal["vllm", "sglang"] = "vllm",
        timeout: float = 300,
        packed_buffer_size_bytes: int = 2**30,
    ) -> None:
        _check(engine, url, transport, protocol, timeout, packed_buffer_size_bytes)
        self._engine: Any = engine
        self._url = url
        self._transport = transport
        self._timeout = timeout
        self._buffer_bytes = packed_buffer_size_bytes
        self._channel: WeightChannel | None = None
        self._packing: dict[str, Any] = {}  # what each update says about packing: nothing, but before vLLM 0.28
        self._ranks = Exchange.between(engine._parts.setup.job.axis_of())
        start, self._update = {
            "vllm": (self._start_vllm, self._update_vllm),
            "sglang": (self._start_sglang, self._update_sglang),
        }[protocol]
        self._together(start)

    def send(self, **export: Any) -> None:
        """Sends all weights. Every rank must call it.

        The server pauses, keeps its requests, gets the weights in the order of ``engine.export_weights`` and resumes.
        After a failure it may hold old and new weights and stay paused.

        Args:
            **export: Of ``engine.export_weights``: ``dtype``, ``adapters``, ``names``, ``exclude_frozen_parameters``.

        Raises:
            CallOrderError: After :meth:`close`, or after a failure.
            CommunicationError: The server died, refused or was late; on every rank.
        """
        if self._engine is None:
            raise CallOrderError(
                f"ServerClient.send: expected an open client, found one for {self._url} that failed or was closed; "
                "make a new ServerClient"
            )
        infos = self._engine.weight_metadata(**export)
        weights: Weights = self._engine.export_weights(**export)
        # Refusals of the export are raised here, on every rank, before the server hears of an update.
        first = next(weights, None)
        weights = chain(() if first is None else (first,), weights)
        del first

        def update() -> None:
            try:
                self._update(infos, weights)
            finally:
                for _ in weights:  # the other ranks gather until the end, whatever the server does
                    pass

        self._together(update)

    def close(self) -> None:
        """Leaves the group of the server's workers. Every rank should call it; further calls do nothing."""
        self._engine = self._channel = None

    def _together(self, action: Callable[[], None]) -> None:
        """Runs ``action`` on rank 0; if it fails, every rank raises and the client is closed."""
        failure = cause = None
        if self._ranks.rank == 0:
            try:
                action()
            except (ServerFailure, OSError) as error:  # OSError: there is no memory to share, or no port
                cause, failure = error, " ".join(str(error).split())
        failure = self._ranks.gather(failure, _DOING)[0]
        if failure is not None:
            self.close()
            raise CommunicationError(
                f"ServerClient: {failure}. The engine is as before: train on, or make a new ServerClient"
            ) from cause

    # -- what rank 0 does -------------------------------------------------------------------------------------------

    def _call(self, path: str, body: Any = None, method: str = "POST") -> ServerCall:
        return ServerCall(self._url, method, path, body, self._timeout)

    def _join(self, path: str, workers: int, body: Callable[[WeightChannel], Any]) -> None:
        """Makes the group of this rank and the workers, which join it while the server answers a call."""
        channel = self._new_channel(workers + 1)
        call = self._call(path, body(channel))
        try:
            call.wait_for(DaemonThread(channel.join))
            call.result()
        except BaseException:
            channel.give_up()
            raise
        self._channel = channel

    def _new_channel(self, world_size: int) -> WeightChannel:
        address = address_towards(urlsplit(self._url).hostname or "") or "127.0.0.1"
        if self._transport == "gloo":
            return TorchChannel(address, world_size, self._timeout)
        kind = VllmNcclChannel if self._update == self._update_vllm else TorchChannel
        return kind(address, world_size, self._timeout, self._engine.device)

    def _start_vllm(self) -> None:
        path = "/init_weight_transfer_engine"
        if self._transport == "shared_memory":
            self._call(path, {"init_info": {}}).result()
            return
        asked = self._call("/get_world_size", method="GET")
        workers = _positive(asked, asked.result(), "world_size")
        packing = {
            "packed": True,
            "packed_buffer_size_bytes": self._buffer_bytes,
            "packed_num_buffers": _PACKED_BUFFERS,
        }
        try:
            self._join(path, workers, lambda channel: {"init_info": {**_place(channel), **packing}})
        except ServerFailure as failure:
            if "packed" not in failure.answer:
                raise
            self._packing = packing
            self._join(path, workers, lambda channel: {"init_info": _place(channel)})

    def _update_vllm(self, infos: list[WeightInfo], weights: Weights) -> None:
        self._call("/pause?mode=keep").result()
        self._call("/start_weight_update").result()
        if self._transport == "shared_memory":
            for bucket in _buckets(infos, self._buffer_bytes):
                self._share(bucket, weights)
        else:
            described = {**_described(infos, "dtype_names"), **self._packing}
            self._broadcast_packed(self._call("/update_weights", {"update_info": described}), infos, weights)
        self._call("/finish_weight_update").result()
        self._call("/resume").result()

    def _broadcast_packed(self, call: ServerCall, infos: list[WeightInfo], weights: Weights) -> None:
        """Sends buffers of tensors beside the call that receives them: one is sent while the next one is filled."""
        channel = self._open_channel()
        sending: DaemonThread | None = None
        for bucket in _buckets(infos, self._buffer_bytes):
            buffer = torch.empty(_nbytes(bucket), dtype=torch.uint8, device=channel.device)
            _fill(buffer, bucket, weights)
            channel.settle()
            if sending is not None:
                call.wait_for(sending)
            sending = DaemonThread(lambda buffer=buffer: channel.broadcast(buffer))  # type: ignore[misc]
        if sending is not None:
            call.wait_for(sending)
        call.result()

    def _share(self, bucket: list[WeightInfo], weights: Weights) -> None:
        """Hands tensors to the server in a block of shared memory, which is removed after the answer."""
        block = SharedMemory(create=True, size=max(_nbytes(bucket), 1))
        try:
            buffer = torch.frombuffer(block.buf, dtype=torch.uint8)
            _fill(buffer, bucket, weights)
            del buffer  # a block with views cannot be closed
            described = {
                **_described(bucket, "dtype_names"),
                "tensor_sizes": [info.nbytes for info in bucket],
                "shared_memory": block.name,
            }
            self._call("/update_weights", {"update_info": described}).result()
        finally:
            block.close()
            block.unlink()

    def _start_sglang(self) -> None:
        self._join(
            "/init_weights_update_group",
            self._sglang_workers(),
            lambda channel: {**_place(channel), "group_name": GROUP, "backend": channel.backend},
        )

    def _sglang_workers(self) -> int:
        asked = self._call("/get_world_size", method="GET")
        try:
            return _positive(asked, asked.result(), "world_size")
        except ServerFailure as failure:
            if failure.status != 404:
                raise
        asked = self._call("/get_server_info", method="GET")  # SGLang's servers do not have the other call
        answer = asked.result()
        return _positive(asked, answer, "tp_size") * (answer.get("pp_size") or 1)

    def _update_sglang(self, infos: list[WeightInfo], weights: Weights) -> None:
        channel = self._open_channel()
        self._call("/pause_generation", {"mode": "retract"}).result()  # keeps its requests, and can drop its cache
        buckets = list(_buckets(infos, self._buffer_bytes))  # a server holds all tensors of a call at once
        for bucket in buckets:
            body = {**_described(bucket, "dtypes"), "group_name": GROUP, "flush_cache": bucket is buckets[-1]}
            call = self._call("/update_weights_from_distributed", body)
            for info in bucket:
                values = _next(info, weights).to(channel.device)
                channel.settle()
                call.wait_for(DaemonThread(lambda values=values: channel.broadcast(values)))  # type: ignore[misc]
            call.result()
        self._call("/continue_generation").result()

    def _open_channel(self) -> WeightChannel:
        assert self._channel is not None, "the client is open"
        return self._channel


def _place(channel: WeightChannel) -> dict[str, Any]:
    """Returns where the workers meet rank 0."""
    return {
        "master_address": channel.address,
        "master_port": channel.port,
        "rank_offset": 1,
        "world_size": channel.world_size,
    }


def _described(infos: list[WeightInfo], dtypes: str) -> dict[str, Any]:
    return {
        "names": [info.name for info in infos],
        dtypes: [str(info.dtype).removeprefix("torch.") for info in infos],
        "shapes": [list(info.shape) for info in infos],
    }


def _buckets(infos: list[WeightInfo], size: int) -> Iterator[list[WeightInfo]]:
    """Yields consecutive tensors whose bytes, with the last one, are more than ``size``, and the rest."""
    bucket: list[WeightInfo] = []
    held = 0
    for info in infos:
        bucket.append(info)
        held += info.nbytes
        if held > size:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


def _nbytes(bucket: list[WeightInfo]) -> int:
    return sum(info.nbytes for info in bucket)


def _next(info: WeightInfo, weights: Weights) -> torch.Tensor:
    name, values = next(weights, ("nothing", torch.empty(0)))
    if (name, values.dtype, tuple(values.shape)) != (info.name, info.dtype, tuple(info.shape)):
        raise ServerFailure(
            "send",
            f"expected {info.name} of {info.dtype} {list(info.shape)}, which weight_metadata() lists, found {name} of "
            f"{values.dtype} {list(values.shape)}; change no parameter meanwhile",
        )
    return values.detach().contiguous()


def _fill(buffer: torch.Tensor, bucket: list[WeightInfo], weights: Weights) -> None:
    """Writes the bytes of tensors into a buffer, one after another."""
    at = 0
    for info in bucket:
        buffer[at : at + info.nbytes].copy_(_next(info, weights).reshape(-1).view(torch.uint8))
        at += info.nbytes


def _positive(call: ServerCall, answer: Any, key: str) -> int:
    found = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(found, int) or found < 1:
        raise call.failure(f'expected {{"{key}": n}} with n from 1 on, found {str(answer)[:80]!r}')
    return found


def _check(engine: Any, url: str, transport: str, protocol: str, timeout: float, buffer_bytes: int) -> None:
    """Raises DeepSpeedConfigError for arguments that cannot be used here; the same on every rank."""
    address = urlsplit(url)
    shared, on_gpu = transport == "shared_memory", engine.device.type == "cuda"
    for name, value, fits, expected in (
        ("url", url, address.scheme in ("http", "https") and address.hostname, "http://host:port or https://host:port"),
        ("transport", transport, transport in ("nccl", "gloo", "shared_memory"), '"nccl", "gloo" or "shared_memory"'),
        ("protocol", protocol, protocol in ("vllm", "sglang"), '"vllm" or "sglang"'),
        ("transport", transport, not shared or protocol == "vllm", '"nccl" or "gloo" with protocol="sglang"'),
        ("transport", transport, transport != "nccl" or on_gpu, f'"gloo" or "shared_memory" on a {engine.device.type}'),
        ("timeout", timeout, timeout > 0, "seconds above 0"),
        ("packed_buffer_size_bytes", buffer_bytes, buffer_bytes > 0, "bytes above 0"),
    ):
        if not fits:
            raise DeepSpeedConfigError(f"ServerClient({name}={value!r}): expected {expected}; pass that")
    if transport == "nccl" and protocol == "vllm":
        require_vllm()
