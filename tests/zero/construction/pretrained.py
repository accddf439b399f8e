"""Small transformers models, and the switch that makes transformers build them for ZeRO stage 3."""

from contextlib import contextmanager
from typing import Any

import torch


def gpt2_config(**more: Any) -> Any:
    from transformers import GPT2Config

    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 97, "n_positions": 24}
    return GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, **more})


def llama_config(**more: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 24,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **more})


def t5_config(**more: Any) -> Any:
    from transformers import T5Config

    sizes = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 97,
        "dropout_rate": 0.0,
    }
    return T5Config(**{**sizes, "decoder_start_token_id": 0, **more})


def vit_config(**more: Any) -> Any:
    from transformers import ViTConfig

    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    return ViTConfig(**{**sizes, **more})


def mixtral_config(**more: Any) -> Any:
    from transformers import MixtralConfig

    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 97, "num_local_experts": 4, "max_position_embeddings": 24,
    }  # fmt: skip
    return MixtralConfig(**{**sizes, **more})


def bert_config(**more: Any) -> Any:
    from transformers import BertConfig

    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 97, "max_position_embeddings": 24,
    }  # fmt: skip
    return BertConfig(**{**sizes, **more})


def distilbert_config(**more: Any) -> Any:
    from transformers import DistilBertConfig

    sizes = {"vocab_size": 97, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    return DistilBertConfig(**{**sizes, **more})


def patchtst_config(**more: Any) -> Any:
    from transformers import PatchTSTConfig

    sizes = {
        "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4,
        "d_model": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "ffn_dim": 16,
        "positional_encoding_type": "sincos",
    }  # fmt: skip
    return PatchTSTConfig(**{**sizes, **more})


def wav2vec2_config(**more: Any) -> Any:
    from transformers import Wav2Vec2Config

    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
        "classifier_proj_size": 16, "num_labels": 3, "layerdrop": 0.0, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0,
    }  # fmt: skip
    return Wav2Vec2Config(**{**sizes, **more})


@contextmanager
def zero3_switched_on(config: dict[str, Any]):
    """What ``TrainingArguments(deepspeed=config)`` does for ``from_pretrained`` and ``from_config``."""
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    switch = HfDeepSpeedConfig(config)  # it must stay alive
    try:
        yield switch
    finally:
        unset_hf_deepspeed_config()


def auto_config(**more: Any) -> dict[str, Any]:
    """A configuration as users keep it in a file: full of "auto"."""
    return {
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "overlap_comm": True,
        },
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": 2,
        **more,
    }  # fmt: skip


def tokens(rank: int, batch: int = 2, length: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 97, (batch, length), generator=generator)
