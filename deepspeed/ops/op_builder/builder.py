"""Builders of operators, which programs use to check whether an operator is supported and to load it.

Nothing is compiled. An operator that upstream compiles is a Python package here, or missing. ``load()`` of a builder
returns the package that implements the operator, and ``is_compatible()`` returns whether there is one. The functions of
upstream's compiled modules are not provided, except flatten and unflatten (:mod:`deepspeed.ops.flattening`).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import ClassVar

from deepspeed.errors import NotYetSupportedError


class OpBuilder:
    """Base class of the builders; each represents one operator.

    Attributes:
        NAME: Name of the operator, a key of ``deepspeed.ops.__compatible_ops__``.
        MODULE: The module that implements it; empty if there is none.
        INSTEAD: What to use instead if there is none.
    """

    NAME: ClassVar[str] = ""
    MODULE: ClassVar[str] = ""
    INSTEAD: ClassVar[str] = "choose one of the builders of deepspeed.ops.op_builder.ALL_OPS"

    def __init__(self, name: str | None = None) -> None:
        self.name = self.NAME if name is None else name

    def is_compatible(self, verbose: bool = False) -> bool:
        """Returns whether a module implements the operator; ``verbose`` has no effect."""
        return bool(self.MODULE)

    def absolute_name(self) -> str:
        """Returns the name of the module that :meth:`load` returns; empty if there is none."""
        return self.MODULE

    def load(self, verbose: bool = True) -> ModuleType:
        """Returns the module that implements the operator.

        Raises:
            NotYetSupportedError: There is no such module.
        """
        if not self.MODULE:
            raise NotYetSupportedError(
                f"deepspeed.ops.op_builder.{type(self).__name__}: nothing is compiled here, and the operator "
                f"{self.name!r} has no counterpart; {self.INSTEAD}"
            )
        return importlib.import_module(self.MODULE)


class CUDAOpBuilder(OpBuilder):
    """Base of the builders of operators for CUDA."""


class TorchCPUOpBuilder(CUDAOpBuilder):
    """Base of the builders of operators for the CPU."""


class CPUAdamBuilder(TorchCPUOpBuilder):
    """Adam on the host."""

    NAME, MODULE = "cpu_adam", "deepspeed.ops.adam"


class CPUAdagradBuilder(TorchCPUOpBuilder):
    """Adagrad on the host."""

    NAME, MODULE = "cpu_adagrad", "deepspeed.ops.adagrad"


class CPULionBuilder(TorchCPUOpBuilder):
    """Lion on the host."""

    NAME, MODULE = "cpu_lion", "deepspeed.ops.lion"


class FusedAdamBuilder(CUDAOpBuilder):
    """Adam on the device."""

    NAME, MODULE = "fused_adam", "deepspeed.ops.adam"


class FusedLambBuilder(CUDAOpBuilder):
    """LAMB on the device."""

    NAME, MODULE = "fused_lamb", "deepspeed.ops.lamb"


class FusedLionBuilder(CUDAOpBuilder):
    """Lion on the device."""

    NAME, MODULE = "fused_lion", "deepspeed.ops.lion"


class SparseAttnBuilder(OpBuilder):
    """Attention over chosen blocks."""

    NAME, MODULE = "sparse_attn", "deepspeed.ops.sparse_attention"


class AsyncIOBuilder(TorchCPUOpBuilder):
    """Asynchronous reads and writes of files."""

    NAME, INSTEAD = "async_io", "offload to NVMe needs none: set offload_optimizer.device to nvme"


class GDSBuilder(AsyncIOBuilder):
    """Reads and writes between files and a GPU."""

    NAME = "gds"


class UtilsBuilder(OpBuilder):
    """Flattening of tensors."""

    NAME, MODULE, INSTEAD = "utils", "deepspeed.ops.flattening", "torch._utils flattens tensors"


class TransformerBuilder(CUDAOpBuilder):
    """A fused transformer layer."""

    NAME, INSTEAD = "transformer", "use the model's own layers, with torch.compile"


class StochasticTransformerBuilder(TransformerBuilder):
    """A fused transformer layer with stochastic rounding."""

    NAME = "stochastic_transformer"


class InferenceBuilder(CUDAOpBuilder):
    """Fused layers for inference."""

    NAME, INSTEAD = "transformer_inference", "use deepspeed.init_inference, or a server such as vLLM"


class SpatialInferenceBuilder(InferenceBuilder):
    """Fused layers of diffusion models."""

    NAME = "spatial_inference"


class InferenceCoreBuilder(InferenceBuilder):
    """Kernels of inference v2."""

    NAME = "inference_core_ops"


class InferenceCutlassBuilder(InferenceBuilder):
    """CUTLASS kernels of inference v2."""

    NAME = "cutlass_ops"


class RaggedOpsBuilder(InferenceBuilder):
    """Ragged batches of inference v2."""

    NAME = "ragged_device_ops"


class RaggedUtilsBuilder(InferenceBuilder):
    """Host side of ragged batches."""

    NAME = "ragged_ops"


class QuantizerBuilder(CUDAOpBuilder):
    """Kernels that quantize tensors."""

    NAME, INSTEAD = "quantizer", "zero_quantized_weights and communication_compression quantize without it"


class FPQuantizerBuilder(QuantizerBuilder):
    """Kernels for formats with few bits."""

    NAME, INSTEAD = "fp_quantizer", "deepspeed.linear has weights of few bits"


class RandomLTDBuilder(CUDAOpBuilder):
    """Kernels of random layerwise token dropping."""

    NAME, INSTEAD = "random_ltd", "data_efficiency.data_routing drops tokens without it"


class EvoformerAttnBuilder(CUDAOpBuilder):
    """Attention of AlphaFold-like models."""

    NAME, INSTEAD = "evoformer_attn", "use torch's scaled_dot_product_attention with a bias as attn_mask"


class DeepCompileBuilder(CUDAOpBuilder):
    """Collectives of DeepCompile."""

    NAME, INSTEAD = "dc", "engine.compile() works without it"


class ShareMemCommBuilder(TorchCPUOpBuilder):
    """Collectives of processors in shared memory."""

    NAME, INSTEAD = "deepspeed_shm_comm", "gloo connects the ranks of a processor"


class CCLCommBuilder(ShareMemCommBuilder):
    """Collectives of oneCCL."""

    NAME = "deepspeed_ccl_comm"


def builders() -> list[type[OpBuilder]]:
    """Returns every builder of an operator."""
    return [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, OpBuilder) and kind.NAME]
