"""Drops layers and tokens at random in training."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.dropping.layers import ProgressiveLayerDrop as ProgressiveLayerDrop
    from deepspeed.dropping.layers import progressive_layer_drop as progressive_layer_drop
    from deepspeed.dropping.tokens import RandomLayerTokenDrop as RandomLayerTokenDrop
    from deepspeed.dropping.tokens import RandomLTDScheduler as RandomLTDScheduler
    from deepspeed.dropping.tokens import convert_to_random_ltd as convert_to_random_ltd

lazy_names(__name__)
