"""Lists the missing features, each with its public names and its configuration keys.

Whoever implements a feature deletes its row here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Key:
    """A configuration key that would switch a missing feature on. A file may have it switched off.

    Attributes:
        name: The key, with dots.
        switched_on: Returns whether a value switches the feature on; not called if the section is absent.
        off: How to switch it off, for messages.
    """

    name: str
    switched_on: Callable[[Any], bool]
    off: str

    @property
    def path(self) -> tuple[str, ...]:
        """The key as a path."""
        return tuple(self.name.split("."))


def switch(name: str) -> Key:
    """Returns the row of a key that is true or false."""
    off = "set it to false or leave the section out" if name.endswith(".enabled") else "set it to false"
    return Key(name, lambda value: value is True, off)


def section(name: str) -> Key:
    """Returns the row of a section whose presence switches a feature on."""
    return Key(name, lambda value: value is not None, "leave the section out")


@dataclass(frozen=True)
class Feature:
    """A missing feature.

    Attributes:
        title: What is missing, as the subject of a sentence.
        instead: One sentence that says what to use instead.
        names: Its public names, by module.
        keys: The configuration keys that would switch it on.
    """

    title: str
    instead: str
    names: dict[str, str] = field(default_factory=dict)
    keys: tuple[Key, ...] = ()

    @property
    def heading(self) -> str:
        """The title with a capital."""
        return self.title[0].upper() + self.title[1:]

    def full_names(self) -> list[str]:
        """Returns every name with its module, in the order of the table."""
        return [f"{module}.{name}" for module, names in self.names.items() for name in names.split()]

    def sentence(self, name: str) -> str:
        """Returns the message of the error that using ``name`` raises."""
        return f"{name}: {self.title} is not supported yet. {self.instead}"

    def refusal(self, key: Key, found: str) -> str:
        """Returns the message for a configuration with ``key`` switched on.

        Args:
            key: One of :attr:`keys`.
            found: Its value as text; empty: the value is not shown.
        """
        value = f" ({found})" if found else ""
        return f"{self.heading}{value} does not exist here yet; {key.off}. {self.instead}"


FEATURES: tuple[Feature, ...] = (
    Feature(
        "the exchange of tokens by DeepEP",
        "Tokens are sent by the backend's own all-to-all.",
        keys=(Key("expert_parallel.comm_backend", lambda value: value == "deepep", 'set it to "comm"'),),
    ),
    Feature(
        "fused layers in the place of a model's own",
        "deepspeed.init_inference keeps the model's own modules, whose attention torch fuses.",
        {
            "deepspeed.module_inject": "replace_transformer_layer HFBertLayerPolicy",
            "deepspeed.model_implementations": "DeepSpeedTransformerInference",
        },
    ),
    Feature(
        "the fused transformer layer",
        "Use torch.nn.TransformerEncoderLayer, whose attention torch fuses.",
        {
            "deepspeed": "DeepSpeedTransformerLayer DeepSpeedTransformerConfig",
            "deepspeed.ops.transformer": "DeepSpeedTransformerLayer DeepSpeedTransformerConfig",
        },
    ),
    Feature(
        "a file writer of its own for checkpoints",
        "Use engine.save_checkpoint, which writes in the background with checkpoint.async_save.",
        {"deepspeed.io": "FastFileWriter FastFileWriterConfig MockFileWriter PyFileWriter"},
    ),
    Feature(
        "the DataStates checkpoint engine",
        "Use engine.save_checkpoint, which writes in the background with checkpoint.async_save.",
        {
            "deepspeed.datastates.config": "DeepSpeedDataStatesConfig",
            "deepspeed.runtime.checkpoint_engine.datastates_checkpoint_engine": "DataStatesCheckpointEngine",
        },
        (section("datastates_ckpt"),),
    ),
    Feature(
        "the Nebula checkpoint engine",
        "Use engine.save_checkpoint, which writes in the background with checkpoint.async_save.",
        {
            "deepspeed.nebula.config": "DeepSpeedNebulaConfig",
            "deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine": "NebulaCheckpointEngine",
        },
        (switch("nebula.enabled"),),
    ),
    Feature(
        "the building of a mixture-of-experts operator",
        "Nothing is compiled here: deepspeed.moe works as it is.",
        {"deepspeed.ops.op_builder": "MoEBuilder"},
    ),
    Feature(
        "the fused attention of Evoformer",
        "Use torch.nn.functional.scaled_dot_product_attention with the sum of the biases as attn_mask.",
        {"deepspeed.ops.deepspeed4science": "DS4Sci_EvoformerAttention"},
    ),
    Feature(
        "Domino",
        "Use tensor_parallel.autotp_size, which sums the gradient of an input while that of the weight is computed.",
        {"deepspeed.runtime.domino.transformer": "DominoTransformer DominoTransformerLayer DominoUtil"},
    ),
    Feature(
        "the quantizer of floats",
        "Use deepspeed.linear, which has weights of few bits, or torchao for fp8.",
        {"deepspeed.ops.fp_quantizer": "FP_Quantize Quantizer"},
    ),
    Feature(
        "the second inference engine",
        "Use vLLM or SGLang to serve a model, and engine.export_weights() to hand it over; deepspeed.init_inference "
        "generates without them.",
        {
            "deepspeed.inference": "InferenceEngineV2 RaggedInferenceEngineConfig build_hf_engine",
            "deepspeed.inference.v2": "InferenceEngineV2 RaggedInferenceEngineConfig build_hf_engine",
            "deepspeed.inference.v2.config_v2": "RaggedInferenceEngineConfig",
            "deepspeed.inference.v2.engine_factory": "build_hf_engine",
            "deepspeed.inference.v2.engine_v2": "InferenceEngineV2",
        },
    ),
    Feature(
        "binding processes to cores",
        "Start the ranks with deepspeed --bind_cores_to_rank.",
        {"deepspeed.utils.numa": "get_numactl_cmd get_numa_cores"},
    ),
    Feature(
        "ZenFlow",
        "Use Adam or AdamW and zero_optimization.offload_optimizer with device cpu; with its super_offload the host's "
        "update begins while gradients still arrive.",
        {
            "deepspeed.ops.adam": "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3",
            "deepspeed.ops.adam.zenflow_cpu_adam": "ZenFlowCPUAdam",
            "deepspeed.ops.adam.zenflow_torch_adam": "ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3",
            "deepspeed.runtime.zenflow.zenflow_config": "ZenFlowConfig",
            "deepspeed.runtime.zenflow.zenflow_stage_1_and_2": "ZenFlowZeroOptimizer",
        },
        (section("zero_optimization.zenflow"),),
    ),
    Feature(
        "mixed precision by Apex or MS-AMP",
        "Use bf16, fp16 or torch_autocast.",
        keys=(switch("amp.enabled"), switch("msamp.enabled")),
    ),
    Feature(
        "AutoSP",
        "Use sequence_parallel_size, which divides the sequences of models of Transformers without a compiler.",
        keys=(Key("compile.passes", lambda value: "autosp" in (value or ()), 'leave "autosp" out'),),
    ),
    Feature("DeepCompile", "Use engine.compile(), which needs none of it.", keys=(switch("compile.deepcompile"),)),
)
