"""A small model of any Hugging Face MoE family, and what the planners need to know of it."""

from __future__ import annotations

from typing import Any

import torch

from moeyard.cluster import Cluster
from moeyard.errors import InvalidModel
from moeyard.model import ModelSpec, num_experts
from moeyard.train.options import DTYPES, Options
from moeyard.train.text import VOCABULARY

# Sizes for a network of 50 Mbit/s, under the names that families use for them.
SIZES: dict[str, int] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "first_k_dense_replace": 0,
    "num_local_experts": 16, "num_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def make_config(options: Options) -> Any:
    """The family's own config with small sizes, changed by `options.config`."""
    from transformers import CONFIG_MAPPING

    if options.family not in CONFIG_MAPPING:
        raise InvalidModel(
            f"transformers knows no model type {options.family!r}; try mixtral, qwen3_moe, olmoe or another of its MoE families"
        )
    config = CONFIG_MAPPING[options.family]()
    for name, value in SIZES.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    for name in _TOKENS:
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)
    for name, value in options.config.items():
        if not hasattr(config, name):
            raise InvalidModel(
                f"the config of {options.family} has no field {name!r}; see its documentation for the names"
            )
        least = 0 if name == "first_k_dense_replace" else 1
        if name in SIZES and not (type(value) is int and value >= least):
            raise InvalidModel(_refused(name, value, f"it must be a whole number of at least {least}"))
        if isinstance(getattr(config, name), int | float) and isinstance(value, str):
            raise InvalidModel(_refused(name, value, "it must be a number"))  # not every transformers looks
        try:
            setattr(config, name, value)
        except Exception as error:  # each family checks its fields in its own way
            raise InvalidModel(_refused(name, value, " ".join(str(error).split())[:200])) from error
    config.use_cache = False
    config.tie_word_embeddings = options.config.get("tie_word_embeddings", True)
    return config


def _refused(name: str, value: Any, why: str) -> str:
    return f"--set {name}={value}: {why}; give another value"


def modules_of(options: Options) -> list[str]:
    """What a rank imports that takes seconds (torch's first optimizer imports its compiler); a lab does it once for all."""
    from transformers import CONFIG_MAPPING

    model = CONFIG_MAPPING[options.family].__module__.replace(".configuration_", ".modeling_")
    return ["moeyard.train.loop", "moeyard.train.turns", "torch._dynamo", model]


def make_model(config: Any, seed: int) -> Any:
    """The same weights on every rank and device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32)
    model.train()
    return model


def describe(config: Any, dtype: str = "float32") -> str:
    return (
        f"{config.model_type}: {config.num_hidden_layers} layers of {num_experts(config)} experts, top-{config.num_experts_per_tok}, "
        f"width {config.hidden_size}, {'float32' if dtype == 'float32' else f'{dtype} on float32 masters'}"
    )


def model_spec(config: Any, options: Options, cluster: Cluster) -> ModelSpec:
    """For the planners: bytes from the config; rates from the emulated accelerator, or a guess where there is none.

    Without an accelerator the guess is the network's own speed: a row is computed in the time a nic takes to carry it.
    """
    spec = ModelSpec.from_config(
        config, flops=1.0, dtype_bytes=DTYPES[options.dtype], tokens_per_rank=options.tokens
    )
    return _at_rate(config, options, options.compute or cluster.scale_out.bandwidth / spec.row_bytes)


def emulated_spec(config: Any, options: Options) -> ModelSpec | None:
    """The same for an emulated accelerator, whatever the cluster; None where none is asked for."""
    return None if options.compute is None else _at_rate(config, options, options.compute)


def _at_rate(config: Any, options: Options, rows_per_second: float) -> ModelSpec:
    width = DTYPES[options.dtype]
    spec = ModelSpec.from_config(config, flops=1.0, dtype_bytes=width, tokens_per_rank=options.tokens)
    flops = rows_per_second * spec.expert_flops
    return ModelSpec.from_config(config, flops=flops, dtype_bytes=width, tokens_per_rank=options.tokens)
