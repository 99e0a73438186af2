"""Models by name or from a Hugging Face config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeyard.errors import UnknownName
from moeyard.formats.strict import PathLike, json_table, named
from moeyard.model import ModelSpec

# Published configurations, with the fields that a ModelSpec needs.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 4096,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 40960,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 163840,
    },
    "mixtral-8x22b": {
        "model_type": "mixtral",
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 65536,
    },
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 40960,
    },
    "dbrx": {
        "model_type": "dbrx",
        "d_model": 6144,
        "n_layers": 40,
        "n_heads": 48,
        "num_key_value_heads": 8,
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        "max_position_embeddings": 32768,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "num_attention_heads": 16,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "max_position_embeddings": 163840,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131072,
    },
}


def model_names() -> list[str]:
    """The models that `load_model` knows by name."""
    return sorted(MODELS)


def model_config(source: PathLike) -> dict[str, Any]:
    """The configuration of a model by name, or of a Hugging Face config.json."""
    text = str(source)
    if text in MODELS:
        return MODELS[text]
    if not (Path(text).suffix == ".json" or "/" in text):
        raise UnknownName.of("model", text, MODELS)
    return json_table(text, "a Hugging Face config")


def load_model(source: PathLike, *, flops: float = 400e12, tokens_per_rank: int | None = None) -> ModelSpec:
    """A model by name, or from a Hugging Face config.json."""
    config = model_config(source)
    with named(str(source)):
        return ModelSpec.from_config(config, flops=flops, tokens_per_rank=tokens_per_rank)
