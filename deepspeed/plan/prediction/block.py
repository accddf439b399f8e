"""Computes the times and bytes of one rank for a block of a decoder, for its embedding, and for its head and loss.

Bytes of elementwise operations are counted kernel by kernel, of forward and of backward, fused or not: a norm reads and
writes once, its backward reads its input too. What a block keeps for backward follows `Korthikanti et al.
<https://arxiv.org/abs/2205.05198>`_, section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from deepspeed.plan.decoder import DecoderShape
from deepspeed.plan.prediction.device_model import DeviceModel
from deepspeed.plan.prediction.layout import ParallelLayout
from deepspeed.plan.prediction.network_model import NetworkModel

_FULL_SCORES = 5  # bytes per score that unfused attention with dropout keeps: softmax, mask, dropped scores
_SOFTMAX, _SOFTMAX_BACKWARD = 4, 6  # bytes per score: one 16-bit value read and one written; two read and one written
_SCORE_DROPOUT = 5  # bytes per score, of forward and of backward: a value read, one written, and a byte of the mask
_LOSS, _LOSS_BACKWARD = 14, 22  # bytes per logit: cast to fp32 and log-softmax; the gradients of both
_FUSED_LOSS = 4  # bytes per logit, of forward and of backward: two passes over 16-bit values
_SCORE_GRADIENTS = 4  # bytes per score of unfused attention: the gradients of a softmax's result and of its input
_WAIT_OF_CHUNKS = 0.25  # share of an exchange, overlapped in chunks with its product, that is still exposed
_CUT_LOSS = 8  # bytes per logit that a loss over tensor ranks adds: exponentials and their product, in fp32
_BACKWARD_FLOPS = 2.5  # of fused attention, over those of its forward: five products instead of two


@dataclass
class WorkTimes:
    """Holds the times of a rank's work in one pass of one micro-batch, in seconds."""

    matmul: float = 0.0  # matrix products
    attention: float = 0.0
    traffic: float = 0.0  # elementwise operations
    exposed: dict[str, float] = field(default_factory=dict)  # exchanges that the next operation waits for, by axis
    exchanged: dict[str, float] = field(default_factory=dict)  # full duration of exchanges by axis, waited for or not
    flops: float = 0.0  # number of floating-point operations
    launches: int = 0  # number of operations that the host starts

    @property
    def compute(self) -> float:
        """Seconds of computation."""
        return self.matmul + self.attention + self.traffic

    @property
    def seconds(self) -> float:
        """Seconds of computation and of the exchanges that it waits for."""
        return self.compute + sum(self.exposed.values())

    def plus(self, other: WorkTimes, times: float = 1.0) -> WorkTimes:
        """Returns the sum of this and ``times`` times ``other``."""
        return WorkTimes(
            self.matmul + times * other.matmul,
            self.attention + times * other.attention,
            self.traffic + times * other.traffic,
            _sum_by_axis(self.exposed, other.exposed, times),
            _sum_by_axis(self.exchanged, other.exchanged, times),
            self.flops + times * other.flops,
            self.launches + round(times * other.launches),
        )

    def wait_along(self, axis: str, exposed: float, exchanged: float) -> None:
        """Sets the seconds of exchanges along an axis, and those of them that the next operation waits for."""
        self.exposed[axis], self.exchanged[axis] = exposed, exchanged


def _sum_by_axis(one: dict[str, float], other: dict[str, float], times: float) -> dict[str, float]:
    return {axis: one.get(axis, 0.0) + times * other.get(axis, 0.0) for axis in one.keys() | other.keys()}


@dataclass(frozen=True)
class BlockTimes:
    """The cost of a block, the embedding or the head, on one rank and for one micro-batch."""

    forward: WorkTimes
    backward: WorkTimes  # the whole backward, with recomputed forward operations
    weight: float  # seconds of that backward that compute gradients of weights
    kept: float  # bytes that forward keeps for backward
    passing: float  # peak of additional bytes while backward runs
    parameters: float  # elements of the parameters that this rank has; experts of other ranks do not count
    expert_parameters: float = 0.0  # elements of experts among ``parameters``
    output: float = 0.0  # bytes of the 16-bit logits; 0 for all but the head


class BlockCost:
    """Computes the times and bytes of the parts of a model, for samples of ``tokens`` tokens."""

    def __init__(
        self, shape: DecoderShape, layout: ParallelLayout, device: DeviceModel, network: NetworkModel, tokens: int
    ) -> None:
        self._shape, self._layout, self._device, self._network = shape, layout, device, network
        self._tokens = layout.micro_batch * tokens / layout.context  # of a micro-batch on this rank
        self._seen = tokens  # by a query, at most
        self._own = tokens / layout.context  # queries of a sample on this rank
        cut = layout.tensor if layout.cuts_norms else 1
        self._between = self._tokens / cut  # tokens between regions that are cut
        self._heads = shape.heads / layout.tensor
        self._kv_heads = max((shape.kv_heads or shape.heads) / layout.tensor, 1)
        self._head = shape.width_of_head
        routes = shape.experts_per_token * layout.imbalance if shape.experts else 1
        self._rows = self._tokens * routes  # that feed-forward layers of the busiest rank compute

    # -- a block -----------------------------------------------------------------------------------------------------

    def block(self) -> BlockTimes:
        """Returns the times of a block."""
        products, (core, core_backward) = self._products(), self._core()
        of_output = sum(self._matmul(*product) for product in products)
        of_input = sum(self._matmul(m, k, n, batch) for m, n, k, batch in products)
        of_weight = sum(self._matmul(n, k, m, batch) for m, n, k, batch in products)
        flops = sum(2 * m * n * k * batch for m, n, k, batch in products)
        there, back = (self._device.traffic(nbytes) for nbytes in self._block_traffic())
        forward = WorkTimes(
            matmul=of_output + core.matmul,
            attention=core.attention,
            traffic=there + core.traffic + self._casts(products, is_backward=False),
            flops=flops + core.flops,
            launches=(24 if self._layout.is_compiled else 40) + self._expert_launches[0],
        )
        backward = WorkTimes(
            matmul=of_input + of_weight + core_backward.matmul,
            attention=core_backward.attention,
            traffic=back + core_backward.traffic + self._casts(products, is_backward=True),
            flops=2 * flops + core_backward.flops,
            launches=(48 if self._layout.is_compiled else 80) + self._expert_launches[1],
        )
        self._add_exchanges(forward, backward, of_output, of_input, of_weight)
        elements = self._shape.attention_parameters / self._layout.tensor + self._expert_parameters
        gathered, summed = self._copies(elements)
        return BlockTimes(
            forward.plus(gathered),
            backward.plus(self._recomputed(forward, core, products[-1])).plus(summed),
            of_weight,
            self._saved_activations(),
            self._passing(),
            elements,
            self._expert_parameters if self._shape.experts else 0.0,
        )

    @property
    def _expert_launches(self) -> tuple[int, int]:
        """Operations of experts in forward and in backward: routes and exchanges, and those of each expert of a rank.

        As recorded in simulated steps of this engine. Programs with fused operations multiply by groups.
        """
        if not self._shape.experts:
            return 0, 0
        if self._layout.is_compiled:
            return 30, 45
        own = self._shape.experts // self._layout.experts
        return 55 + 5 * own, 10 + 14 * own

    def _products(self) -> list[tuple[float, float, float, float]]:
        """Returns m, n, k and number of the matrix products of a block's forward."""
        shape, hidden = self._shape, self._shape.hidden
        width = shape.width / self._layout.tensor
        rise = width * (2 if shape.is_gated else 1)
        found = [
            (self._tokens, (self._heads + 2 * self._kv_heads) * self._head, hidden, 1.0),
            (self._tokens, hidden, self._heads * self._head, 1.0),
        ]
        if not shape.experts:
            return [*found, (self._tokens, rise, hidden, 1.0), (self._tokens, hidden, width, 1.0)]
        own = shape.experts / self._layout.experts
        rows = self._rows / own
        router = (self._tokens, float(shape.experts), float(hidden), 1.0)
        return [*found, router, (rows, rise, hidden, own), (rows, hidden, width, own)]

    def _matmul(self, m: float, n: float, k: float, batch: float = 1.0) -> float:
        return self._device.matmul(m, n, k, batch=batch, fp8=self._layout.is_fp8)

    def _casts(self, products: list[tuple[float, float, float, float]], *, is_backward: bool) -> float:
        """Returns the seconds of casting operands to fp8, in two layouts. Backward casts only gradients.

        An operand's two bytes are read, and a byte is written for each layout.
        """
        if not self._layout.is_fp8 or not self._device.device.fp8_flops:
            return 0.0
        if is_backward:
            return self._device.traffic(sum(4 * batch * m * n for m, n, _, batch in products))
        times = 1 / self._layout.accumulation if self._layout.is_megatron else 1.0
        return self._device.traffic(sum(4 * batch * (m * k + times * n * k) for m, n, k, batch in products))

    def _core(self) -> tuple[WorkTimes, WorkTimes]:
        """Returns the times of attention between its projections, of forward and of backward."""
        samples, heads = self._layout.micro_batch, self._heads
        scores = samples * heads * self._own * self._seen
        if self._shape.has_fused_attention:
            flops = 4 * scores * self._head / 2  # causal
            if self._layout.is_ring and not self._layout.balances_ring:
                flops *= 2 - 1 / self._layout.context  # the rank with the last tokens
            back = _BACKWARD_FLOPS * flops
            return (
                WorkTimes(attention=self._device.attention(flops, self._head), flops=flops),
                WorkTimes(attention=self._device.attention(back, self._head, backward=True), flops=back),
            )
        product = self._device.matmul(self._own, self._seen, self._head, batch=samples * heads)
        mixed = self._device.matmul(self._own, self._head, self._seen, batch=samples * heads)
        dropped = _SCORE_DROPOUT if self._shape.dropout else 0
        there, back = (self._device.traffic(scores * (of + dropped)) for of in (_SOFTMAX, _SOFTMAX_BACKWARD))
        flops = 4 * scores * self._head
        return (
            WorkTimes(matmul=product + mixed, traffic=there, flops=flops, launches=4),
            WorkTimes(matmul=2 * (product + mixed), traffic=back, flops=2 * flops, launches=8),
        )

    def _block_traffic(self) -> tuple[float, float]:
        """Returns the bytes that elementwise operations move, in forward and in backward, except those on scores."""
        shape, is_fused = self._shape, self._layout.is_compiled
        between, inside = self._between * shape.hidden, self._tokens * shape.hidden
        attended, pairs = self._tokens * self._heads * self._head, self._tokens * self._kv_heads * self._head
        wide = self._rows * shape.width / self._layout.tensor
        # Elements read and written. Two norms, and two sums with the residual stream, whose gradients are summed too.
        there, back = (4 + 6) * between, (6 + 6) * between
        if shape.dropout:  # a mask of one byte per element; fused with the sum, nothing else is read or written again
            there += (1 if is_fused else 5) * between
            back += 5 * between
        if shape.is_gated:
            rotary = (2 if is_fused else 10) * (attended + pairs)
            there += rotary + (3 if is_fused else 5) * wide
            back += rotary + (5 if is_fused else 9) * wide
            if not is_fused:  # gradients of one input, from queries, keys and values, and from gate and rise
                back += 3 * 3 * inside
        else:
            there, back = there + 2 * wide, back + 3 * wide
        if self._kv_heads < self._heads and not is_fused:  # keys and values are repeated for every head
            there, back = there + 2 * (attended + pairs), back + 2 * (attended + pairs)
        if self._layout.cuts_norms and not self._layout.is_megatron:
            # Parts of sequences are copied into their order, after each gather and before each reduction.
            there, back = there + 4 * 2 * inside, back + 4 * 2 * inside
        if shape.experts:  # to the order of experts, and back
            there, back = there + 6 * self._rows * shape.hidden, back + 6 * self._rows * shape.hidden
        return 2 * there, 2 * back

    def _copies(self, elements: float) -> tuple[WorkTimes, WorkTimes]:
        """Returns the times of copies of parameters in forward, and of parameters and gradients in backward.

        Gradients are copied into a buffer for their exchange, or at stages 0 and 1 added to the sum over micro-batches,
        unless the product does that beside its arithmetic. FSDP copies what it has gathered out of the gather's buffer,
        once for each pass; this engine computes with the buffer.
        """
        layout = self._layout
        gathered = 4 * elements if layout.is_fsdp and layout.stage == 3 else 0.0
        if layout.sums_in_products:
            moved = 0.0
        elif layout.stage < 2 and layout.accumulation > 1:
            moved = (2 + 2 * (layout.summed_bytes or layout.gradient_bytes)) * elements
        else:
            moved = (2 + layout.gradient_bytes) * elements
        return (
            WorkTimes(traffic=self._device.traffic(gathered)),
            WorkTimes(traffic=self._device.traffic(gathered + moved)),
        )

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def _add_exchanges(
        self, forward: WorkTimes, backward: WorkTimes, of_output: float, of_input: float, of_weight: float
    ) -> None:
        """Adds the exchanges that are waited for; ``of_*`` are the seconds of products by what they give."""
        layout, network = self._layout, self._network
        nbytes = 2 * self._tokens * self._shape.hidden
        if layout.tensor > 1:
            group = layout.tensor_group
            once = 2 * network.gather(nbytes, group) if layout.cuts_norms else network.sum_of_activations(nbytes, group)
            if layout.overlaps_tensor:
                there, back = (
                    max(_WAIT_OF_CHUNKS * once, once - products / 2) for products in (of_output, of_input + of_weight)
                )
                forward.wait_along("tensor", 2 * there, 2 * once)
                backward.wait_along("tensor", 2 * back, 2 * once)
            else:
                forward.wait_along("tensor", 2 * once, 2 * once)
                # The gradient of an input is sent while the gradient of its weight is computed; with cut norms
                # gradients of outputs are gathered beforehand, and Megatron gathers inputs again, which torch keeps.
                hidden = min(once, of_weight / 2) * (0.5 if layout.cuts_norms else 1.0)
                more = 2 * network.gather(nbytes, group) if layout.cuts_norms and layout.is_megatron else 0.0
                backward.wait_along("tensor", 2 * (once - hidden) + max(0.0, more - hidden), 2 * once + more)
        if layout.context > 1:
            self._add_context_exchanges(forward, backward)
        if self._shape.experts and layout.experts > 1:
            copies = self._shape.experts_per_token if layout.sends_once_per_node else 1
            rows = self._rows
            if not (layout.sends_once_per_node or layout.is_megatron or layout.is_fsdp):  # once to each rank
                rows = self._tokens * layout.imbalance * layout.experts * self._share_of_rank()
            once = 2 * network.exchange_of_activations(
                2 * rows * self._shape.hidden, layout.expert_group, copies=copies
            )
            forward.wait_along("expert", once, once)
            backward.wait_along("expert", once, once)

    def _share_of_rank(self) -> float:
        """Returns the share of tokens that have an expert on a given rank."""
        experts, choices = self._shape.experts, self._shape.experts_per_token
        return 1 - math.comb(experts - experts // self._layout.experts, choices) / math.comb(experts, choices)

    def _add_context_exchanges(self, forward: WorkTimes, backward: WorkTimes) -> None:
        layout, network = self._layout, self._network
        pair = 2 * 2 * self._tokens * self._kv_heads * self._head  # keys and values
        if layout.is_ring:
            hop, steps = network.send(pair, layout.tensor), layout.context - 1
            beside = forward.attention + (0.0 if self._shape.has_fused_attention else forward.matmul)
            there = max(0.0, hop - beside / layout.context)
            back = max(0.0, 2 * hop - _BACKWARD_FLOPS * beside / layout.context)
            forward.wait_along("context", steps * there, steps * hop)
            backward.wait_along("context", steps * back, steps * 2 * hop)
            return
        once = network.exchange_of_activations(
            pair + 2 * 2 * self._tokens * self._heads * self._head, layout.context_group
        )
        forward.wait_along("context", once, once)
        backward.wait_along("context", once, once)

    # -- recomputation, and what is kept -----------------------------------------------------------------------------

    def _recomputed(self, forward: WorkTimes, core: WorkTimes, last: tuple[float, float, float, float]) -> WorkTimes:
        """Returns the forward work that backward recomputes, of attention ``core`` and the last product ``last``."""
        how = self._layout.recompute
        if how == "full":
            return forward if self._layout.is_megatron else forward.plus(self._not_repeated(forward, last), -1)
        if how == "attention":
            return core
        if how == "selective":
            again = WorkTimes(matmul=forward.matmul / 2, traffic=forward.traffic, launches=forward.launches)
            again.flops = (forward.flops - core.flops) / 2
            if not self._shape.has_fused_attention:
                again = again.plus(core)
            return again
        return WorkTimes()

    def _not_repeated(self, forward: WorkTimes, last: tuple[float, float, float, float]) -> WorkTimes:
        """Returns the end of forward, which torch does not recompute, as backward does not need its result.

        This is the last product, the exchange of its result, and the sum with the residual stream.
        """
        m, n, k, batch = last
        found = WorkTimes(
            matmul=self._matmul(*last),
            traffic=self._device.traffic(2 * 3 * self._between * self._shape.hidden),
            flops=2 * m * n * k * batch,
        )
        # Half of the exchanges of experts and of sums over tensor ranks; with cut norms one of two gathers and two
        # reductions.
        for axis, share in (("tensor", 0.25 if self._layout.cuts_norms else 0.5), ("expert", 0.5)):
            if axis in forward.exposed:
                found.wait_along(axis, share * forward.exposed[axis], share * forward.exchanged[axis])
        return found

    def _saved_activations(self) -> float:
        shape, layout, hidden = self._shape, self._layout, self._shape.hidden
        if layout.recompute == "full":
            return 2 * self._between * hidden
        if layout.recompute == "selective":
            # The input, the attention's result, and every other product that a backward needs: queries, values, and the
            # gate or the rise.
            attended, kv = self._heads * self._head, self._kv_heads * self._head
            outputs = 2 * attended + kv + shape.width / layout.tensor * self._rows / self._tokens
            return 2 * self._between * hidden + 2 * self._tokens * outputs
        return self._all_saved_activations() + (self._saved_scores() if layout.recompute == "none" else 0.0)

    def _all_saved_activations(self) -> float:
        """Returns the bytes that a block keeps without recomputation, except scores of unfused attention."""
        shape, layout, hidden = self._shape, self._layout, self._shape.hidden
        attended, rows = self._heads * self._head, self._rows
        operand = 1 if layout.is_fp8 else 2  # bytes of what a projection keeps
        inner = 2 + operand  # bytes per element of the width: the activation's input, and that of the last projection
        if shape.is_gated:
            inner += 2 if layout.is_compiled else 4  # the other factor; without fusion also the activation's result
        kept = 2 * (2 + operand) * self._between * hidden  # inputs of norms and of projections
        # Keys and values; without fusion they are repeated for every head before attention.
        pairs = attended if shape.has_fused_attention and not layout.is_compiled else self._kv_heads * self._head
        kept += self._tokens * (2 * attended + 2 * 2 * pairs)
        kept += self._tokens * attended * (2 if operand == 2 else 3)  # of the kernel, and of the projection
        kept += inner * rows * shape.width / layout.tensor
        if shape.experts:
            kept += 2 * 2 * rows * hidden
        if shape.dropout:
            kept += 2 * self._between * hidden  # masks
        return kept

    def _saved_scores(self) -> float:
        """Returns the bytes of scores that unfused attention keeps."""
        return 0.0 if self._shape.has_fused_attention else (_FULL_SCORES if self._shape.dropout else 2) * self._scores

    @property
    def _scores(self) -> float:
        return self._layout.micro_batch * self._heads * self._own * self._seen

    def _passing(self) -> float:
        """Returns the peak bytes of gradients and recomputed activations in a block's backward."""
        shape, hidden = self._shape, self._shape.hidden
        # Of a gated activation's result and both factors; of a plain one's result and input.
        wide = 2 * self._rows * shape.width / self._layout.tensor * (3 if shape.is_gated else 2)
        scores = 0.0 if shape.has_fused_attention else _SCORE_GRADIENTS * self._scores
        gradients = max(wide, scores) + 2 * 2 * self._tokens * hidden
        if self._layout.recompute == "none":
            return gradients
        return gradients + self._all_saved_activations() + self._saved_scores() - self._saved_activations()

    # -- ends --------------------------------------------------------------------------------------------------------

    def embedding(self) -> BlockTimes:
        """Returns the times of the embedding."""
        shape, layout = self._shape, self._layout
        moved = 2 * 2 * self._tokens * shape.hidden
        forward = WorkTimes(traffic=self._device.traffic(moved), launches=2)
        own = shape.vocab * shape.hidden / self._vocabulary_ranks
        backward = WorkTimes(traffic=self._device.traffic(2 * moved + 2 * own), launches=4)
        if self._vocabulary_ranks > 1:
            nbytes = 2 * self._tokens * shape.hidden
            group = layout.tensor_group
            once = (
                self._network.gather(nbytes, group)
                if layout.cuts_norms
                else self._network.sum_of_activations(nbytes, group)
            )
            forward.wait_along("tensor", once, once)
            back = self._network.gather(nbytes, group) if layout.cuts_norms else 0.0
            backward.wait_along("tensor", back, back)
        gathered, summed = self._copies(own)
        return BlockTimes(forward.plus(gathered), backward.plus(summed), 0.0, 0.0, 0.0, own)

    def head(self) -> BlockTimes:
        """Returns the times of the last norm, the head and the loss."""
        shape, layout = self._shape, self._layout
        wide = shape.vocab / self._vocabulary_ranks
        product = self._device.matmul(self._tokens, wide, shape.hidden)
        scores = self._tokens * wide
        there, back = (_FUSED_LOSS, _FUSED_LOSS) if layout.has_fused_loss else (_LOSS, _LOSS_BACKWARD)
        forward = WorkTimes(
            matmul=product,
            traffic=self._device.traffic(there * scores),
            flops=2 * scores * shape.hidden,
            launches=12,
        )
        of_input = self._device.matmul(self._tokens, shape.hidden, wide)
        of_weight = self._device.matmul(wide, shape.hidden, self._tokens)
        backward = WorkTimes(
            matmul=of_input + of_weight,
            traffic=self._device.traffic(back * scores),
            flops=4 * scores * shape.hidden,
            launches=16,
        )
        if self._vocabulary_ranks > 1:
            nbytes = 2 * self._tokens * shape.hidden
            once = self._network.sum_of_activations(nbytes, layout.tensor_group)
            gather = once / 2 if layout.cuts_norms else 0.0
            forward.wait_along("tensor", gather, gather)
            backward.wait_along("tensor", max(0.0, once - of_weight), once)
        # Fused: the 16-bit logits and their gradient. Otherwise, in fp32: logarithms of probabilities, their gradient,
        # and that of the logits; the 16-bit logits are freed before.
        of_score, more = (2, 2) if layout.has_fused_loss else (4, 8)
        if self._vocabulary_ranks > 1 and not layout.has_fused_loss:
            more += _CUT_LOSS
        kept, passing = 2 * self._between * shape.hidden + of_score * scores, more * scores
        own = wide * shape.hidden
        gathered, summed = self._copies(own)
        forward, backward = forward.plus(gathered), backward.plus(summed)
        return BlockTimes(forward, backward, of_weight, kept, passing, own, output=2 * scores)

    @property
    def _vocabulary_ranks(self) -> int:
        return self._layout.tensor if self._layout.cuts_vocabulary else 1

    @property
    def _expert_parameters(self) -> float:
        shape, layout = self._shape, self._layout
        own = shape.expert_parameters / layout.tensor
        return own * shape.experts / layout.experts + shape.experts * shape.hidden if shape.experts else own
