"""What a row and an expert of a model cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from moeyard.errors import InvalidModel

_FIXED_TOP_K = {"switch_transformers": 1, "nllb-moe": 2}  # routers whose top-k is not in the config
_NON_GATED = ("nemotron_h", "switch_transformers", "nllb-moe")  # two matrices an expert: up, down


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One MoE layer of a model, as the planners see it, and the rate at which a rank computes it."""

    row_bytes: int  # one token row on the wire
    expert_bytes: int  # the parameters of one expert, on the wire
    expert_flops: float  # forward, per row; the backward costs twice this
    flops: float  # flop/s of a rank of speed 1
    non_moe_forward: float = 0.0  # seconds of everything else in the layer (attention, norms, dense parts)
    non_moe_backward: float = 0.0
    layers: int = 1  # MoE layers
    gradient_bytes: int = 0  # the gradient of one expert, on the wire; 0: as many as expert_bytes
    optimizer_bytes: int = (
        -1
    )  # what moves with an expert besides its parameters; -1: three floats per bf16 parameter
    activation_bytes: int = 0  # kept per row between forward and backward, on the rank that computes it
    router: float = 0.0  # seconds of the router, between the non-MoE part and the dispatch
    wan_expert_bytes: int = (
        0  # one expert between datacenters, as a codec sends it; 0: as many as expert_bytes
    )
    coding_seconds: float = 0.0  # to encode one expert, or to decode it

    def __post_init__(self) -> None:
        if self.gradient_bytes == 0:
            object.__setattr__(self, "gradient_bytes", self.expert_bytes)
        if self.optimizer_bytes == -1:
            object.__setattr__(self, "optimizer_bytes", 6 * self.expert_bytes)
        if self.wan_expert_bytes == 0:
            object.__setattr__(self, "wan_expert_bytes", self.expert_bytes)
        for what in ("row_bytes", "expert_bytes", "layers", "gradient_bytes", "wan_expert_bytes"):
            _whole(what, getattr(self, what), least=1)
        for what in ("optimizer_bytes", "activation_bytes"):
            _whole(what, getattr(self, what), least=0)
        for what in ("expert_flops", "flops"):
            value = getattr(self, what)
            if not (value > 0 and math.isfinite(value)):
                raise InvalidModel(f"{what} must be positive and finite, got {value!r}")
        for what in ("non_moe_forward", "non_moe_backward", "router", "coding_seconds"):
            value = getattr(self, what)
            if not (value >= 0 and math.isfinite(value)):
                raise InvalidModel(f"{what} must be zero or more seconds and finite, got {value!r}")

    @property
    def row_seconds(self) -> float:
        """Forward time of one row in one expert on a rank of speed 1."""
        return self.expert_flops / self.flops

    @property
    def coded(self) -> bool:
        """Whether experts cross between datacenters in messages of a codec."""
        return self.wan_expert_bytes != self.expert_bytes

    def but(self, **changes: object) -> ModelSpec:
        """The same model with some fields changed. Gradient, optimizer and wan bytes left at their defaults follow expert_bytes."""
        if "expert_bytes" in changes:
            if self.gradient_bytes == self.expert_bytes:
                changes.setdefault("gradient_bytes", 0)
            if self.optimizer_bytes == 6 * self.expert_bytes:
                changes.setdefault("optimizer_bytes", -1)
            if not self.coded:
                changes.setdefault("wan_expert_bytes", 0)
        return replace(self, **changes)  # type: ignore[arg-type]

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        flops: float = 400e12,
        dtype_bytes: int = 2,
        tokens_per_rank: int | None = None,
        gradient_dtype_bytes: int | None = None,
    ) -> ModelSpec:
        """From a Hugging Face config (an object or a dict). `flops` is what a rank really reaches, in flop/s.

        The non-MoE time is what `tokens_per_rank` tokens take in one layer besides the routed experts: attention with its
        projections, shared experts, router; zero if that is not given. Dense layers count where they stand: their time is
        shared out over the MoE layers.
        """
        hidden = _of(config, "hidden_size", "d_model", "n_embd")
        inner = _inner(config)
        gated = _model_type(config) not in _NON_GATED
        weights = (3 if gated else 2) * hidden * inner
        layers, dense_layers = _moe_layers(config)
        experts = num_experts(config)
        forward = router = 0.0
        if tokens_per_rank is not None:
            per_token = _attention_flops(config, hidden) + 2.0 * _shared_weights(config, hidden, inner, gated)
            dense_inner = _maybe(config, "intermediate_size", "ffn_dim", "d_ff") or inner
            dense = _attention_flops(config, hidden) + 2.0 * (3 if gated else 2) * hidden * dense_inner
            forward = tokens_per_rank * (per_token + dense * dense_layers / layers) / flops
            router = tokens_per_rank * 2.0 * hidden * experts / flops
        return cls(
            row_bytes=hidden * dtype_bytes,
            expert_bytes=weights * dtype_bytes,
            expert_flops=2.0 * weights,
            flops=flops,
            non_moe_forward=forward,
            non_moe_backward=2 * forward,
            layers=layers,
            gradient_bytes=weights * (gradient_dtype_bytes or dtype_bytes),
            optimizer_bytes=12 * weights,
            activation_bytes=(hidden + (3 if gated else 1) * inner) * dtype_bytes,
            router=router,
        )


def num_experts(config: Any) -> int:
    """Routed experts per MoE layer of a Hugging Face config."""
    return _of(
        config,
        "num_local_experts",
        "n_routed_experts",
        "num_experts",
        "moe_num_experts",
        "num_routed_experts",
        "n_experts",
    )


def top_k(config: Any) -> int:
    """Rows that each token makes: the experts chosen per token."""
    fixed = _FIXED_TOP_K.get(_model_type(config))
    return fixed or _of(
        config,
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "experts_per_token",
        "num_selected_experts",
        "top_k_experts",
        "top_k",
    )


def _inner(config: Any) -> int:
    """Width of one routed expert."""
    return _of(
        config,
        "moe_intermediate_size",
        "moe_ffn_hidden_size",
        "expert_ffn_hidden_size",
        "ffn_hidden_size",
        "intermediate_size",
        "ffn_dim",
        "encoder_ffn_dim",
        "d_ff",
    )


def _moe_layers(config: Any) -> tuple[int, int]:
    """(MoE layers, dense layers)."""
    layers = _of(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if _model_type(config) == "longcat_flash":  # counts its two attentions as layers
        layers = _of(config, "num_layers")
    if _field(_text(config), "is_encoder_decoder"):
        layers += _maybe(config, "num_decoder_layers", "decoder_layers") or 0
    kinds = _field(_text(config), "mlp_layer_types")
    blocks = _field(_text(config), "layers_block_type")
    if isinstance(kinds, (list, tuple)) and len(kinds) == layers:
        sparse = sum(kind != "dense" for kind in kinds)
    elif isinstance(blocks, (list, tuple)) and "moe" in blocks:
        sparse = blocks.count("moe")
    else:
        only_dense = _field(_text(config), "mlp_only_layers") or ()
        if not isinstance(only_dense, (list, tuple)):
            raise InvalidModel(f"mlp_only_layers is {only_dense!r:.60}; give a list of layers")
        dense = _maybe(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index") or len(
            only_dense
        )
        step = _maybe(
            config,
            "decoder_sparse_step",
            "encoder_sparse_step",
            "moe_layer_frequency",
            "moe_layer_interval",
            "expert_layer_period",
            "interleave_moe_layer_step",
            "moe_layer_freq",
        )
        sparse = (layers - dense) // (step or 1)
    if not 0 < sparse <= layers:
        raise InvalidModel(
            f"{type(config).__name__} has {layers} layers and no MoE layer; give a ModelSpec by hand"
        )
    return sparse, layers - sparse


def _attention_flops(config: Any, hidden: int) -> float:
    """Forward flops per token of one attention: projections, and scores over half the context (causal)."""
    heads = _maybe(config, "num_attention_heads", "n_heads", "n_head", "num_heads") or 1
    size = _maybe(config, "head_dim", "d_kv") or hidden // heads
    groups = _maybe(config, "num_key_value_heads", "n_head_kv") or heads
    lora = _maybe(config, "kv_lora_rank")
    if lora is None:
        weights = 2 * hidden * heads * size + 2 * hidden * groups * size  # q, o and k, v
        mixing = 2 * heads * size
    else:  # latent attention: down and up projections instead of k and v
        value = _maybe(config, "v_head_dim") or size
        rope = _maybe(config, "qk_rope_head_dim") or 0
        nope = _maybe(config, "qk_nope_head_dim") or size
        query = _maybe(config, "q_lora_rank")
        weights = hidden * (lora + rope) + lora * heads * (nope + value) + heads * value * hidden
        weights += (
            hidden * heads * (nope + rope) if query is None else query * (hidden + heads * (nope + rope))
        )
        mixing = heads * (nope + rope + value)
    context = _maybe(config, "sliding_window", "max_position_embeddings", "n_positions") or 0
    return 2.0 * weights + 2.0 * mixing * min(context, 4096) / 2


def _shared_weights(config: Any, hidden: int, inner: int, gated: bool) -> int:
    """Parameters of the experts that every token passes."""
    width = _maybe(
        config,
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
    )
    if width is None:
        count = _maybe(
            config, "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"
        )
        width = (count or 0) * inner
    return (3 if gated else 2) * hidden * width


def _text(config: Any) -> Any:
    inner = _field(config, "text_config")
    return config if inner is None else inner


def _model_type(config: Any) -> str:
    found = _field(_text(config), "model_type")
    return found if isinstance(found, str) else ""


def _of(config: Any, *names: str) -> int:
    """The first of these fields that the config's text part, or the config, has."""
    value = _maybe(config, *names)
    for name in names if value is None else ():
        for part in (_text(config), config, _field(_text(config), "ffn_config")):
            if (given := _field(part, name)) is not None:
                raise InvalidModel(f"{name} is {given!r:.60}; give a whole number of at least 1")
    if value is None:
        raise InvalidModel(
            f"{type(config).__name__} has none of {', '.join(names)}; give a ModelSpec by hand"
        )
    return value


_MOST = 2**40  # of anything that a config counts: products of several stay numbers


def _maybe(config: Any, *names: str) -> int | None:
    for part in (_text(config), config, _field(_text(config), "ffn_config")):
        for name in names:
            value = _field(part, name)
            if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
                value = max(value)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                if value >= _MOST:
                    raise InvalidModel(f"{name} is {value}; no model has that, correct it")
                return value
    return None


def _field(config: Any, name: str) -> Any:
    if config is None:
        return None
    if isinstance(config, dict):
        return config.get(name)
    try:
        return getattr(config, name, None)
    except (AttributeError, ValueError):  # fields that differ from layer to layer refuse to be read
        return None


def _whole(what: str, value: float, least: int) -> None:
    if int(value) != value or value < least:
        raise InvalidModel(f"{what} must be a whole number of at least {least}, got {value!r}")


# For callers who give no model: 32 layers, rows of 4096 and experts of width 2048 in bf16, on a rank that reaches 400 Tflop/s.
STAND_IN = ModelSpec(
    row_bytes=2 * 4096,
    expert_bytes=2 * 3 * 4096 * 2048,
    expert_flops=2.0 * 3 * 4096 * 2048,
    flops=400e12,
    layers=32,
)
