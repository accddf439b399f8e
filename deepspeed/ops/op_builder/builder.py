"""Builders of operators, which programs use to check whether an operator is supported and to load it.

Nothing is compiled. An operator that upstream compiles is a Python package here, or missing. ``load()`` of a builder
returns the package that implements the operator, and ``is_compatible()`` returns whether there is one. The functions of
upstream's compiled modules are not provided, except flatten and unflatten (:mod:`deepspeed.ops.flattening`).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import torch

from deepspeed.errors import NotYetSupportedError


class OpBuilder:
    """Base class of the builders; each represents one operator."""

    NAME: ClassVar[str] = ""  # name of the operator, a key of ``deepspeed.ops.__compatible_ops__``
    MODULE: ClassVar[str] = ""  # the module that implements it; empty if there is none
    # what to use instead if there is none
    INSTEAD: ClassVar[str] = "choose one of the builders of deepspeed.ops.op_builder.ALL_OPS"

    def __init__(self, name: str | None = None) -> None:
        self.name = self.NAME if name is None else name

    def is_compatible(self, verbose: bool = False) -> bool:
        """Returns whether a module implements the operator; ``verbose`` has no effect."""
        return bool(self.MODULE)

    def absolute_name(self) -> str:
        """Returns the name of the module that :meth:`load` returns; empty if there is none."""
        return self.MODULE

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Returns whether torch is built for ROCm."""
        return torch.version.hip is not None

    def load(self, verbose: bool = True) -> ModuleType:
        """Returns the module that implements the operator. Raises NotYetSupportedError: there is no such module."""
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


BUILDERS = {
    "CPUAdamBuilder": ("TorchCPUOpBuilder", "cpu_adam", "Adam on the host."),
    "CPUAdagradBuilder": ("TorchCPUOpBuilder", "cpu_adagrad", "Adagrad on the host."),
    "CPULionBuilder": ("TorchCPUOpBuilder", "cpu_lion", "Lion on the host."),
    "FusedAdamBuilder": ("CUDAOpBuilder", "fused_adam", "Adam on the device."),
    "FusedLambBuilder": ("CUDAOpBuilder", "fused_lamb", "LAMB on the device."),
    "FusedLionBuilder": ("CUDAOpBuilder", "fused_lion", "Lion on the device."),
    "SparseAttnBuilder": ("OpBuilder", "sparse_attn", "Attention over chosen blocks."),
    "AsyncIOBuilder": ("TorchCPUOpBuilder", "async_io", "Asynchronous reads and writes of files."),
    "GDSBuilder": ("AsyncIOBuilder", "gds", "Reads and writes between files and a GPU."),
    "UtilsBuilder": ("OpBuilder", "utils", "Flattening of tensors."),
    "TransformerBuilder": ("CUDAOpBuilder", "transformer", "A fused transformer layer."),
    "StochasticTransformerBuilder": (
        "TransformerBuilder",
        "stochastic_transformer",
        "A fused transformer layer with stochastic rounding.",
    ),
    "InferenceBuilder": ("CUDAOpBuilder", "transformer_inference", "Fused layers for inference."),
    "SpatialInferenceBuilder": ("InferenceBuilder", "spatial_inference", "Fused layers of diffusion models."),
    "InferenceCoreBuilder": ("InferenceBuilder", "inference_core_ops", "Kernels of inference v2."),
    "InferenceCutlassBuilder": ("InferenceBuilder", "cutlass_ops", "CUTLASS kernels of inference v2."),
    "RaggedOpsBuilder": ("InferenceBuilder", "ragged_device_ops", "Ragged batches of inference v2."),
    "RaggedUtilsBuilder": ("InferenceBuilder", "ragged_ops", "Host side of ragged batches."),
    "QuantizerBuilder": ("CUDAOpBuilder", "quantizer", "Kernels that quantize tensors."),
    "FPQuantizerBuilder": ("QuantizerBuilder", "fp_quantizer", "Kernels for formats with few bits."),
    "RandomLTDBuilder": ("CUDAOpBuilder", "random_ltd", "Kernels of random layerwise token dropping."),
    "EvoformerAttnBuilder": ("CUDAOpBuilder", "evoformer_attn", "Attention of AlphaFold-like models."),
    "DeepCompileBuilder": ("CUDAOpBuilder", "dc", "Collectives of DeepCompile."),
    "ShareMemCommBuilder": ("TorchCPUOpBuilder", "deepspeed_shm_comm", "Collectives of processors in shared memory."),
    "CCLCommBuilder": ("ShareMemCommBuilder", "deepspeed_ccl_comm", "Collectives of oneCCL."),
}
"""The base of each builder, the name of its operator, and what the operator is."""
#: Operators that a module implements.
_MODULES = {  # "" where it would inherit one
    "cpu_adam": "deepspeed.ops.adam",
    "cpu_adagrad": "deepspeed.ops.adagrad",
    "cpu_lion": "deepspeed.ops.lion",
    "fused_adam": "deepspeed.ops.adam",
    "fused_lamb": "deepspeed.ops.lamb",
    "fused_lion": "deepspeed.ops.lion",
    "sparse_attn": "deepspeed.ops.sparse_attention",
    "async_io": "deepspeed.offload.async_io",
    "gds": "",
    "utils": "deepspeed.ops.flattening",
}
#: What to use instead of the others; builders without an entry inherit it.
_INSTEAD = {
    "gds": "AsyncIOBuilder reads into host memory, and offload_optimizer.device: nvme needs neither",
    "utils": "torch._utils flattens tensors",
    "transformer": "use the model's own layers, with torch.compile",
    "transformer_inference": "use deepspeed.init_inference, or a server such as vLLM",
    "quantizer": "zero_quantized_weights and communication_compression quantize without it",
    "fp_quantizer": "deepspeed.linear has weights of few bits",
    "random_ltd": "data_efficiency.data_routing drops tokens without it",
    "evoformer_attn": "use torch's scaled_dot_product_attention with a bias as attn_mask",
    "dc": "engine.compile() works without it",
    "deepspeed_shm_comm": "gloo connects the ranks of a processor",
}


if TYPE_CHECKING:  # the classes are made below
    CPUAdamBuilder: type[OpBuilder]
    CPUAdagradBuilder: type[OpBuilder]
    CPULionBuilder: type[OpBuilder]
    FusedAdamBuilder: type[OpBuilder]
    FusedLambBuilder: type[OpBuilder]
    FusedLionBuilder: type[OpBuilder]
    SparseAttnBuilder: type[OpBuilder]
    AsyncIOBuilder: type[OpBuilder]
    GDSBuilder: type[OpBuilder]
    UtilsBuilder: type[OpBuilder]
    TransformerBuilder: type[OpBuilder]
    StochasticTransformerBuilder: type[OpBuilder]
    InferenceBuilder: type[OpBuilder]
    SpatialInferenceBuilder: type[OpBuilder]
    InferenceCoreBuilder: type[OpBuilder]
    InferenceCutlassBuilder: type[OpBuilder]
    RaggedOpsBuilder: type[OpBuilder]
    RaggedUtilsBuilder: type[OpBuilder]
    QuantizerBuilder: type[OpBuilder]
    FPQuantizerBuilder: type[OpBuilder]
    RandomLTDBuilder: type[OpBuilder]
    EvoformerAttnBuilder: type[OpBuilder]
    DeepCompileBuilder: type[OpBuilder]
    ShareMemCommBuilder: type[OpBuilder]
    CCLCommBuilder: type[OpBuilder]


def _make(class_name: str) -> type[OpBuilder]:
    """Makes the class of a builder; what it does not state it inherits."""
    base, operator, meaning = BUILDERS[class_name]
    stated = {"NAME": operator, "MODULE": _MODULES.get(operator), "INSTEAD": _INSTEAD.get(operator)}
    own = {name: value for name, value in stated.items() if value is not None}
    return type(class_name, (globals()[base],), {"__doc__": meaning, "__module__": __name__, **own})


for _name in BUILDERS:
    globals()[_name] = _make(_name)
del _name


def builders() -> list[type[OpBuilder]]:
    """Returns every builder of an operator."""
    return [globals()[name] for name in BUILDERS]
