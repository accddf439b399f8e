"""The builders of operators under upstream's names, which compile nothing (:mod:`deepspeed.ops.op_builder.builder`)."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.ops.op_builder import all_ops as all_ops
    from deepspeed.ops.op_builder import builder as builder
    from deepspeed.ops.op_builder.all_ops import ALL_OPS as ALL_OPS
    from deepspeed.ops.op_builder.builder import AsyncIOBuilder as AsyncIOBuilder
    from deepspeed.ops.op_builder.builder import CCLCommBuilder as CCLCommBuilder
    from deepspeed.ops.op_builder.builder import CPUAdagradBuilder as CPUAdagradBuilder
    from deepspeed.ops.op_builder.builder import CPUAdamBuilder as CPUAdamBuilder
    from deepspeed.ops.op_builder.builder import CPULionBuilder as CPULionBuilder
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder as CUDAOpBuilder
    from deepspeed.ops.op_builder.builder import DeepCompileBuilder as DeepCompileBuilder
    from deepspeed.ops.op_builder.builder import EvoformerAttnBuilder as EvoformerAttnBuilder
    from deepspeed.ops.op_builder.builder import FPQuantizerBuilder as FPQuantizerBuilder
    from deepspeed.ops.op_builder.builder import FusedAdamBuilder as FusedAdamBuilder
    from deepspeed.ops.op_builder.builder import FusedLambBuilder as FusedLambBuilder
    from deepspeed.ops.op_builder.builder import FusedLionBuilder as FusedLionBuilder
    from deepspeed.ops.op_builder.builder import GDSBuilder as GDSBuilder
    from deepspeed.ops.op_builder.builder import InferenceBuilder as InferenceBuilder
    from deepspeed.ops.op_builder.builder import InferenceCoreBuilder as InferenceCoreBuilder
    from deepspeed.ops.op_builder.builder import InferenceCutlassBuilder as InferenceCutlassBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder as OpBuilder
    from deepspeed.ops.op_builder.builder import QuantizerBuilder as QuantizerBuilder
    from deepspeed.ops.op_builder.builder import RaggedOpsBuilder as RaggedOpsBuilder
    from deepspeed.ops.op_builder.builder import RaggedUtilsBuilder as RaggedUtilsBuilder
    from deepspeed.ops.op_builder.builder import RandomLTDBuilder as RandomLTDBuilder
    from deepspeed.ops.op_builder.builder import ShareMemCommBuilder as ShareMemCommBuilder
    from deepspeed.ops.op_builder.builder import SparseAttnBuilder as SparseAttnBuilder
    from deepspeed.ops.op_builder.builder import SpatialInferenceBuilder as SpatialInferenceBuilder
    from deepspeed.ops.op_builder.builder import StochasticTransformerBuilder as StochasticTransformerBuilder
    from deepspeed.ops.op_builder.builder import TorchCPUOpBuilder as TorchCPUOpBuilder
    from deepspeed.ops.op_builder.builder import TransformerBuilder as TransformerBuilder
    from deepspeed.ops.op_builder.builder import UtilsBuilder as UtilsBuilder

lazy_names(__name__)
