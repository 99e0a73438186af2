"""Small Hugging Face models and batches, the same on every rank."""

from __future__ import annotations

import torch
from torch.nn import functional

VOCABULARY, WIDTH = 61, 16


def config_of(family, **options):
    """A config so small that a step takes milliseconds."""
    from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if family == "mixtral":
        return MixtralConfig(
            **common | {"intermediate_size": 12, "num_local_experts": 6, "num_experts_per_tok": 2} | options
        )
    if family == "qwen3_moe":
        own = {"moe_intermediate_size": 12, "intermediate_size": 20, "num_experts": 6, "head_dim": 8}
        return Qwen3MoeConfig(**common | own | {"num_experts_per_tok": 2} | options)
    if family == "gpt_oss":  # stacked on disk, with biases
        own = {"intermediate_size": 12, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}
        return GptOssConfig(**common | own | options)
    if family == "deepseek_v3":
        own = {
            "moe_intermediate_size": 12,
            "intermediate_size": 20,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        }
        return DeepseekV3Config(**common | own | options)
    raise ValueError(family)


def model_of(family, dtype=torch.float64, seed=0, **options):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config_of(family, **options), dtype=dtype)


def tokens_of(seed, sequences=8, length=12):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (sequences, length), generator=generator)


def share_of(tokens, rank, world):
    """Sequences rank, rank + world, ..."""
    return tokens[rank::world]


def loss_sum(model, tokens):
    """(summed loss of the next tokens, their number). An empty share still takes part, with labels that do not count."""
    if len(tokens) == 0:
        tokens = torch.zeros((1, 2), dtype=torch.int64)
        return model(tokens, use_cache=False).logits.sum() * 0.0, 0
    logits = model(tokens, use_cache=False).logits[:, :-1]
    labels = tokens[:, 1:]
    loss = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")
    return loss, labels.numel()
