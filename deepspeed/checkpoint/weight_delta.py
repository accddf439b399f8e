"""Weights for a receiver that has an earlier version of them: only the blocks that differ, compressed.

Each rank keeps fingerprints of its own part of each parameter, as it was sent last. Parameters of which no rank's part
changed are not gathered. Rank 0 keeps a fingerprint of each block of 16 KiB, and sends blocks whose bytes changed.

A delta is a list of pieces: one with the versions, some with tensors, one with their number. A piece is a magic
word, a letter for the compression, the length of a compressed head (JSON) in four bytes, the head, and compressed data.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal

import torch

from deepspeed.checkpoint.exchange import Exchange
from deepspeed.checkpoint.export import ExportOptions, iter_weights
from deepspeed.checkpoint.run_state import RunState
from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.untouched import untouched

BLOCK_BYTES = 2**14
MESSAGE_BYTES = 2**26
_MAGIC = b"dsdelta1"

Compression = Literal["zlib", "zstd"]


def _zstd() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise DeepSpeedConfigError(
            'export_delta(compression="zstd"): expected the package zstandard, which is not installed; install '
            'deepspeed[zstd] here and where the weights are received, or use compression="zlib"'
        ) from None


_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "zlib": lambda data: zlib.compress(data, 1),
    "zstd": lambda data: _zstd().ZstdCompressor(level=1).compress(data),  # type: ignore[no-any-return]
}
_EXPAND: dict[bytes, Callable[[bytes], bytes]] = {
    b"z": zlib.decompress,
    b"s": lambda data: _zstd().ZstdDecompressor().decompress(data),  # type: ignore[no-any-return]
}
_LETTERS = {"zlib": b"z", "zstd": b"s"}


def check_compression(compression: str) -> None:
    """Raises DeepSpeedConfigError for an unknown compression, or one whose package is missing."""
    if compression not in _COMPRESS:
        raise DeepSpeedConfigError(
            f"export_delta(compression={compression!r}): expected {' or '.join(map(repr, _COMPRESS))}; pass one of them"
        )
    _COMPRESS[compression](b"")


@dataclass
class SentWeights:
    """What is known of the weights that were sent last."""

    version: str | None = None  # None: nothing was sent, or not to the end
    own: dict[str, bytes] = field(default_factory=dict)  # fingerprints of this rank's parts of parameters
    blocks: dict[str, list[bytes]] = field(default_factory=dict)  # on rank 0: of each tensor's blocks


def iter_delta(
    run_state: RunState,
    exchange: Exchange,
    options: ExportOptions,
    sent: SentWeights,
    *,
    since: str | None,
    next_version: Callable[[bool], str],
    compression: Compression,
) -> Iterator[bytes]:
    """Yields the pieces of a delta on rank 0. Every rank must go through it.

    Args:
        since: The version that the receiver has, which counts on rank 0. All weights are sent if it is not the one
            that was sent last.
        next_version: Returns the version of the present weights; gets whether they differ from those sent last.
    """
    own = _fingerprints(run_state.runtime)
    changed = [name for name, value in own.items() if sent.own.get(name) != value]
    gathered = exchange.gather((since, changed), "comparing the weights with those sent last")
    given, before = gathered[0][0], sent.version
    is_full = given is None or given != before
    names = {name for _, theirs in gathered for name in theirs}
    buffers = run_state.buffers().keys()
    if not is_full:
        options = replace(options, rename=lambda name: name if name in names or name in buffers else None)
    version = next_version(bool(names))
    sent.version = None  # until the receiver can have all of it
    if is_full:
        sent.blocks.clear()
    compress, letter = _COMPRESS[compression], _LETTERS[compression]
    if exchange.rank == 0:
        yield _message(compress, letter, {"version": version, "since": None if is_full else given}, b"")
    entries: list[Any] = []
    data: list[bytes] = []
    count = 0
    for name, values in iter_weights(run_state, exchange, options, everywhere=False):
        raw = _bytes_of(values)
        runs = _changed_runs(raw, sent.blocks, name)
        if runs or is_full:
            entries.append([name, str(values.dtype).removeprefix("torch."), list(values.shape), runs])
            data += [bytes(raw[start:stop]) for start, stop in runs]
            count += 1
        if sum(map(len, data)) >= MESSAGE_BYTES:
            yield _message(compress, letter, {"tensors": entries}, b"".join(data))
            entries, data = [], []
    if exchange.rank == 0:
        if entries:
            yield _message(compress, letter, {"tensors": entries}, b"".join(data))
        yield _message(compress, letter, {"count": count}, b"")
    sent.own, sent.version = own, version


def _message(compress: Callable[[bytes], bytes], letter: bytes, head: dict[str, Any], data: bytes) -> bytes:
    packed = compress(json.dumps(head, separators=(",", ":")).encode())
    return b"".join([_MAGIC, letter, len(packed).to_bytes(4, "little"), packed, compress(data) if data else b""])


def _bytes_of(values: torch.Tensor) -> memoryview:
    flat = values.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _fingerprints(runtime: ZeroRuntime) -> dict[str, bytes]:
    """Returns fingerprints of this rank's parts of the parameters by name; each rank takes a share of whole ones."""
    found: dict[str, Any] = {}
    with untouched(), torch.no_grad():
        for bucket in runtime.buckets:
            for place, tile in enumerate(bucket.layout.tiles):
                if bucket.is_sharded:
                    fragment = bucket.fragment(place)
                    values = None if fragment is None else bucket.shard[fragment.in_slice]
                elif place % bucket.transport.size == bucket.transport.rank:
                    start = bucket.layout.starts[place]
                    values = bucket.full.tensor[start : start + tile.numel]
                else:
                    values = None
                if values is not None:
                    found.setdefault(tile.logical, blake2b(digest_size=16)).update(_bytes_of(values))
    return {name: fingerprint.digest() for name, fingerprint in found.items()}


def _changed_runs(raw: memoryview, blocks: dict[str, list[bytes]], name: str) -> list[list[int]]:
    """Returns the changed bytes of a tensor as ``[start, stop]``, and keeps the fingerprints of its blocks."""
    starts = range(0, len(raw), BLOCK_BYTES)
    present = [blake2b(raw[start : start + BLOCK_BYTES], digest_size=8).digest() for start in starts]
    before = blocks.get(name, [])
    blocks[name] = present
    runs: list[list[int]] = []
    for number, start in enumerate(starts):
        if number < len(before) and before[number] == present[number]:
            continue
        stop = min(start + BLOCK_BYTES, len(raw))
        if runs and runs[-1][1] == start:
            runs[-1][1] = stop
        else:
            runs.append([start, stop])
    return runs


@torch.no_grad()
def apply_delta(weights: MutableMapping[str, torch.Tensor], pieces: Iterable[bytes], version: str | None = None) -> str:
    """Changes weights to those of ``engine.export_delta``, bit for bit.

    Args:
        weights: Tensors by name, on any device, which change in place; those of a full export that are missing are
            added, on the host. A state dict, or an empty dict.
        pieces: All that the engine yielded on rank 0, in order.
        version: The version of ``weights``: what the last call returned.

    Returns:
        The version of the weights now, for ``export_delta(since=...)``.

    Raises:
        CheckpointError: The pieces are for another version or other tensors, or are not complete. No weight changed.
    """
    read = [_DeltaMessage.read(message) for message in pieces]
    heads = [message.head for message in read]
    entries = [entry for head in heads for entry in head.get("tensors", ())]
    if not heads or "version" not in heads[0] or heads[-1].get("count") != len(entries):
        raise CheckpointError(
            f"apply_delta: expected all pieces of one export_delta in their order, found {len(read)} that begin or end "
            "otherwise; pass all that the engine yielded on rank 0"
        )
    since = heads[0]["since"]
    if since is not None and since != version:
        raise CheckpointError(
            f"apply_delta(version={version!r}): expected weights of version {since!r}, which the pieces change; none "
            f"was changed. Ask the trainer for export_delta(since={version!r})"
        )
    for name, dtype, shape, _ in entries:
        present = weights.get(name)
        if since is None and present is None:
            continue
        found = None if present is None else (str(present.dtype).removeprefix("torch."), list(present.shape))
        if found != (dtype, shape):
            raise CheckpointError(
                f"apply_delta: expected {name!r} as {dtype} {shape}, found {found or 'no such tensor'}; nothing was "
                "changed. Pass an empty dict and the pieces of export_delta(since=None)"
            )
    for message in read:  # damage is found before anything changes
        message.expanded()
    for message in read:
        _write(weights, message)
    return str(heads[0]["version"])


def _write(weights: MutableMapping[str, torch.Tensor], message: _DeltaMessage) -> None:
    data, place = bytearray(message.expanded()), 0
    for name, dtype, shape, runs in message.head.get("tensors", ()):
        target = weights.get(name)
        if target is None:
            target = weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        whole = target.detach().contiguous()
        flat = whole.reshape(-1).view(torch.uint8)
        for start, stop in runs:
            flat[start:stop].copy_(torch.frombuffer(data, dtype=torch.uint8, count=stop - start, offset=place))
            place += stop - start
        if whole.data_ptr() != target.data_ptr():  # it was a copy
            target.detach().copy_(whole)


@dataclass(frozen=True)
class _DeltaMessage:
    """A piece of a delta."""

    head: dict[str, Any]
    data: bytes  # compressed
    letter: bytes

    @classmethod
    def read(cls, message: bytes) -> _DeltaMessage:
        """Reads the head of a piece. Raises CheckpointError: it is damaged, or none of this format."""
        start = len(_MAGIC) + 5
        letter = message[len(_MAGIC) : len(_MAGIC) + 1]
        if message[: len(_MAGIC)] != _MAGIC or letter not in _EXPAND:
            raise CheckpointError(
                f"apply_delta: expected pieces of export_delta, found {bytes(message[:9])!r} at the beginning; pass "
                "what the engine yielded, unchanged"
            )
        stop = start + int.from_bytes(message[start - 4 : start], "little")
        return cls(json.loads(_expand(letter, message[start:stop])), message[stop:], letter)

    def expanded(self) -> bytes:
        """Returns the data. Raises CheckpointError: its length is not that of the head's runs, or it is damaged."""
        data = _expand(self.letter, self.data) if self.data else b""
        expected = sum(stop - start for *_, runs in self.head.get("tensors", ()) for start, stop in runs)
        if len(data) != expected:
            raise CheckpointError(
                f"apply_delta: expected {expected} bytes in a piece, found {len(data)}; send the pieces again"
            )
        return data


def _expand(letter: bytes, data: bytes) -> bytes:
    try:
        return _EXPAND[letter](data)
    except DeepSpeedConfigError:
        raise
    except Exception as error:  # each library has an error of its own
        raise CheckpointError(f"apply_delta: a piece is damaged ({error}); send the pieces again") from error
