"""The codecs by which an engine's groups send gradients and parameters, and the log lines about them.

The section ``communication_compression`` requests codecs, and so do the keys of ZeRO++ in ``zero_optimization``;
``sparse_gradients`` sends the non-zero rows of embeddings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from deepspeed.comm.base.codec import Codec, Residual, bits_of
from deepspeed.comm.codecs.coded import CodedTransport, coded
from deepspeed.comm.codecs.table import CODECS
from deepspeed.comm.transports.transport import Reduction, Transport, transfer_key
from deepspeed.config.codec_names import PLAIN_CODECS
from deepspeed.config.sections.communication_compression import CommunicationCompression
from deepspeed.config.sections.root import Root
from deepspeed.config.sections.zero import ZeroOptimization
from deepspeed.engine_feature import EngineSetup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.gradient.trial import UPDATES
from deepspeed.zero.group import Groups
from deepspeed.zero.tiling.describe import ROWS, describe, put_in_group
from deepspeed.zero.tiling.layout import DATA

_MARGIN = 1.1
"""How much faster codes must be alone to be tried; smaller differences are noise."""
MEASURED_NUMEL = 1 << 20
"""Elements of a timed reduction. On a link of 100 Mbit/s it takes about a third of a second."""
_ROUNDS = 3  # the first of them is not counted
_BUCKET = (1 << 15) - 1  # a number that no bucket has


def compressed(groups: Groups, setup: EngineSetup, precision: PrecisionPolicy, *, has_warm_up: bool) -> Groups:
    """Returns the groups with the codecs that the configuration requests. Every rank must call it."""
    if ROWS in groups.by_name and setup.device.type != "meta":  # a plan has no row numbers: it counts whole gradients
        rows = replace(groups[ROWS], reduces_rows=True)
        groups = replace(groups, by_name={**groups.by_name, ROWS: rows})
    groups = with_codecs(groups, setup.root, precision, setup.device, has_warm_up=has_warm_up)
    return use_zero_plus_plus(groups, setup.root.zero_optimization)


def with_codecs(
    groups: Groups, root: Root, precision: PrecisionPolicy, device: torch.device, *, has_warm_up: bool
) -> Groups:
    """Returns the groups as ``communication_compression`` wants them. Every rank must call it.

    Args:
        has_warm_up: Gradients are sent in the warm-up of the optimizer only.
    """
    section = root.communication_compression
    reduce, measured = gradient_codec(section), ""
    if section.gradients == "auto":
        reduce, measured = _measured_codec(groups, root, precision, device)
    gather = CODECS[section.weights].codec() if section.weights is not None else None
    early = _early_codec(section, has_warm_up=has_warm_up)
    if has_warm_up and early is not None:
        log_dist(
            f"communication_compression: in the warm-up gradients are sent as {early.name} codes: "
            f"{bits_of(early):.2f} bits per element instead of {gradient_bits(root, precision)}"
        )
        return groups.coded(gather, early)
    if reduce is None and gather is None:
        if measured:
            log_dist(f"communication_compression: gradients are sent uncompressed: {measured}")
        return groups
    coded = groups.coded(gather, reduce, early=early)
    lines = [_gradients_line(section, reduce, coded, gradient_bits(root, precision))] if reduce is not None else []
    if measured:
        lines.append(measured)
    if gather is not None:
        lines.append(f"parameters are sent as int8 codes ({bits_of(gather):.2f} bits per element), masters stay exact")
    if not any(isinstance(g.gradient_transport, CodedTransport) or g.size > 1 for g in coded):
        lines = ["nothing is sent, since no parameter is shared between ranks"]
    log_dist(f"communication_compression: {'; '.join(lines)}")
    return coded


def gradient_codec(section: CommunicationCompression) -> Codec | None:
    """Returns the codec of gradients that the section names; None where it names none."""
    if section.gradients is None or section.gradients == "auto":
        return None
    return _codec(section.gradients, section)


def _early_codec(section: CommunicationCompression, *, has_warm_up: bool) -> Codec | None:
    """Returns how gradients are sent before those updates that ``gradients`` is for."""
    if section.warm_up is None:
        return None
    if not has_warm_up and not (section.gradients and section.start_step):
        log_dist(
            f'communication_compression.warm_up "{section.warm_up}" has no effect: gradients are sent in the '
            "same way from the first update on; give gradients and start_step"
        )
        return None
    return CODECS[section.warm_up].codec(feeds_back=False)


def default_codec(name: str) -> Codec:
    """Returns the codec of gradients of that name, with its default settings."""
    return _codec(name, CommunicationCompression())


def _codec(name: str, section: CommunicationCompression) -> Codec:
    return CODECS[name].codec(block=section.block, feeds_back=section.error_feedback)


def _measured_codec(
    groups: Groups, root: Root, precision: PrecisionPolicy, device: torch.device
) -> tuple[Codec | None, str]:
    """Returns the codec that pays on the links of this job, and what was measured; None where none does."""
    transport = max((group.reduce for group in groups), key=lambda one: one.size)
    if transport.size == 1 or device.type == "meta":
        return None, "there is no network to measure"
    # Signs need more care than a trial of speed.
    codecs = [_codec(name, root.communication_compression) for name in PLAIN_CODECS]
    dtype = precision.reduce_dtype(precision.compute_dtype or torch.float32)
    to_owner = root.zero_optimization.stage > 0
    plain, *others = reduction_seconds(transport, codecs, dtype, device, to_owner=to_owner)
    listed = ", ".join(f"{1e3 * took:.3g} ms as {codec.name}" for took, codec in zip(others, codecs, strict=True))
    measured = f"the sum of {MEASURED_NUMEL / 2**20:.0f}Mi elements takes {1e3 * plain:.3g} ms plain, {listed}"
    best = min(range(len(codecs)), key=lambda index: others[index])
    return (codecs[best] if others[best] * _MARGIN < plain else None), measured


def gradient_bits(root: Root, precision: PrecisionPolicy) -> int:
    """Returns the bits of an uncompressed element of a gradient; sums over micro-batches are wider."""
    gradient = precision.compute_dtype or torch.float32
    if root.zero_optimization.stage < 2 and (root.gradient_accumulation_steps or 1) > 1:
        gradient = precision.accumulate_dtype
    return 8 * precision.reduce_dtype(gradient).itemsize


def _gradients_line(section: CommunicationCompression, codec: Codec, groups: Groups, plain_bits: int) -> str:
    bits = bits_of(codec)
    feedback = "with" if codec.feeds_back else "without"
    if section.gradients == "auto":
        until = section.start_step + UPDATES + 1
        phase = f"in turn with plain gradients until update {until}, and then if that is faster"
        return f"gradients are sent as {codec.name} codes ({bits:.2f} bits per element instead of {plain_bits}) {phase}"
    phase = f"from update {section.start_step + 1} on" if section.start_step else "from the first update on"
    phase += f", until then as {section.warm_up}" if section.start_step and section.warm_up else ""
    exact = ""
    if any(group.spans_stages for group in groups):
        exact = "; between replicas in other parts of the model they are sent uncompressed"
    return (
        f"gradients are sent as {codec.name} codes {phase}: {bits:.2f} bits per element instead of "
        f"{plain_bits}, {plain_bits / bits:.1f} times fewer, {feedback} error feedback{exact}"
    )


def reduction_seconds(
    transport: Transport, codecs: Sequence[Codec], dtype: torch.dtype, device: torch.device, *, to_owner: bool
) -> list[float]:
    """Returns the seconds of one reduction without a codec, then with each; the slowest rank's.

    Every rank must call it.
    """
    length = -(-MEASURED_NUMEL // (64 * transport.size)) * 64
    flat = torch.randn(length * transport.size, device=device).to(dtype)
    out = torch.empty(length if to_owner else flat.numel(), device=device)
    best = []
    count = 0
    for codec in (None, *codecs):
        candidate = coded(transport, codec)
        error = None
        if codec is not None and codec.feeds_back:
            owned = None if to_owner else torch.zeros(length, device=device)
            error = Residual(torch.zeros(flat.numel(), device=device), owned)
        took = []
        for _ in range(_ROUNDS):
            transport.gather_small(torch.zeros(1), channel="call", label="the measurement of the link")
            count += 1
            key = transfer_key(transport.owner, _BUCKET, 1, count)
            how = Reduction(1.0, key, "the measurement of the link", MEASURED_NUMEL, error=error)
            started = time.perf_counter()
            (candidate.reduce_scatter if to_owner else candidate.all_reduce)(flat.clone(), out, how).wait()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            took.append(time.perf_counter() - started)
        best.append(min(took[1:]))
    label = "the measurement of the link"
    rows = transport.gather_small(torch.tensor(best, dtype=torch.float64), channel="call", label=label)
    return [float(slowest) for slowest in rows.max(dim=0).values]


def use_zero_plus_plus(groups: Groups, zero: ZeroOptimization) -> Groups:
    """Returns the groups with the codecs that ZeRO++ keys request; unchanged without any. Every rank must call it.

    ZeRO++ (arXiv 2306.10209; LoCo: arXiv 2407.04480): qwZ is a codec on the gathers of parameters, qgZ one on both
    halves of a reduction (between the ranks that share slices, then between those that hold the same ones). hpZ is the
    placement with neighbors. Each is independent of the others.
    """
    if zero.stage < 3:
        return groups
    weights: Codec | None = CODECS["int8"].codec(feeds_back=False) if zero.zero_quantized_weights else None
    frozen: Codec | None = CODECS["int8"].codec(feeds_back=False) if zero.zero_quantized_nontrainable_weights else None
    gradients = _codec_of_qgz(zero)
    if weights is None and frozen is None and gradients is None:
        return groups
    names = [
        "all weights" if weights else "frozen weights" if frozen else "",
        "gradients" if gradients is not None else "",
    ]
    kinds = {"all weights": "8 bits", "frozen weights": "8 bits", "gradients": "4 bits"}
    log_dist("ZeRO++: " + ", ".join(f"{what} are sent in {kinds[what]}" for what in names if what))
    present = next(iter(groups))  # what communication_compression requests as well
    return groups.coded(
        weights or present.gather_codec,
        gradients or present.reduce_codec,
        frozen=weights or frozen or present.frozen_codec,
        early=present.early_codec,
    )


def _codec_of_qgz(zero: ZeroOptimization) -> Codec | None:
    if not zero.zero_quantized_gradients:
        return None
    loco = zero.zeropp_loco_param
    if loco is None:
        return CODECS["int4"].codec(feeds_back=False)
    assert loco.err_beta is not None
    return CODECS["loco"].codec(beta=loco.err_beta)


def steps_until_reset(zero: ZeroOptimization) -> int:
    """Updates after which LoCo forgets what was lost; 0: never."""
    loco = zero.zeropp_loco_param
    return (loco.reset_T or 0) if zero.stage == 3 and loco is not None else 0


def tables_of_rows(setup: EngineSetup, *, has_warm_up: bool) -> dict[str, bool]:
    """Puts the tables of embeddings into a group of their own, if ``sparse_gradients`` is set; communicates nothing.

    Returns:
        The name of the group, and that every rank counts in it; empty without such tables.

    Raises:
        DeepSpeedConfigError: Gradients are not sent as sums over data-parallel ranks alone.
    """
    if not setup.root.sparse_gradients:
        return {}
    problem = None
    if setup.ranks.model_size > 1:
        problem = f"tensor or pipeline parallelism (a model over {setup.ranks.model_size} ranks)"
    elif setup.ranks.islands > 1:
        problem = "islands"
    elif has_warm_up:
        problem = "an optimizer that exchanges momentum in the place of gradients"
    if problem is not None:
        raise DeepSpeedConfigError(
            f"sparse_gradients: expected gradients that are summed over data-parallel ranks, found {problem}. Set it "
            "to false"
        )
    tables = [
        (f"{name}.weight", module.weight)
        for name, module in setup.model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]
    found = [(name, table) for name, table in tables if describe(name, table).group == DATA]
    put_in_group([table for _, table in found], ROWS)  # type: ignore[misc]
    listed = ", ".join(dict.fromkeys(name for name, _ in found)) or "none, as the model has no embedding"
    log_dist(f"sparse_gradients: of these gradients only the non-zero rows are sent: {listed}")
    return {ROWS: True} if found else {}
