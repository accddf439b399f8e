"""Upstream's import path for names of 4 modules."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.parallel.tensor.gathering import GatherReplacedLayerParams
    from deepspeed.parallel.tensor.linear import ColumnLinear as LinearLayer
    from deepspeed.parallel.tensor.linear import GatedColumnLinear as GateUpPack_LinearLayer
    from deepspeed.parallel.tensor.linear import PackedColumnLinear as SubParamLinearLayer
    from deepspeed.parallel.tensor.linear import PackedRowLinear as SubParamLinearAllreduce
    from deepspeed.parallel.tensor.linear import RowLinear as LinearAllreduce
    from deepspeed.parallel.tensor.linear import WholeInputRowLinear as LinearAllreduceWithReplicatedInput
    from deepspeed.parallel.tensor.request import set_autotp_mode
    from deepspeed.parallel.tensor.vocabulary import VocabularyEmbedding as VocabParallelEmbedding
    from deepspeed.parallel.tensor.vocabulary import WidthEmbedding as HiddenParallelEmbedding

    __all__ = [
        "GateUpPack_LinearLayer",
        "GatherReplacedLayerParams",
        "HiddenParallelEmbedding",
        "LinearAllreduce",
        "LinearAllreduceWithReplicatedInput",
        "LinearLayer",
        "SubParamLinearAllreduce",
        "SubParamLinearLayer",
        "VocabParallelEmbedding",
        "set_autotp_mode",
    ]

lazy_names(__name__)
