"""Upstream's import path for names of 5 modules."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.parallel.sequence.chunked import chunked_attention as chunked_attention
    from deepspeed.parallel.sequence.exchange import exchange as exchange
    from deepspeed.parallel.sequence.loss import mean_loss as mean_loss
    from deepspeed.parallel.sequence.loss import sum_over_ranks as sum_over_ranks
    from deepspeed.parallel.sequence.ring import ring_attention as ring_attention
    from deepspeed.parallel.sequence.vocabulary import chunked_cross_entropy as chunked_cross_entropy
    from deepspeed.sequence import cross_entropy as cross_entropy
    from deepspeed.sequence import fpdt_layer as fpdt_layer
    from deepspeed.sequence import layer as layer
    from deepspeed.sequence import linear_cross_entropy as linear_cross_entropy
    from deepspeed.sequence import vocab_parallel_ops as vocab_parallel_ops

lazy_names(__name__)
