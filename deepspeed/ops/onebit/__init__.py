"""The optimizers 1-bit Adam, 1-bit LAMB and 0/1 Adam, which exchange their momentum with one bit per element."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.ops.onebit import adam as adam
    from deepspeed.ops.onebit import lamb as lamb
    from deepspeed.ops.onebit import phases as phases
    from deepspeed.ops.onebit import zero_one as zero_one
    from deepspeed.ops.onebit.adam import OneBitAdam as OneBitAdam
    from deepspeed.ops.onebit.lamb import OneBitLamb as OneBitLamb
    from deepspeed.ops.onebit.zero_one import ZeroOneAdam as ZeroOneAdam

lazy_names(__name__)
