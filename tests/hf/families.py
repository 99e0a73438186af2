"""Every family of transformers with routed experts, as a tiny config of it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

EXPERTS = 6  # not divisible by four ranks

# Small values for the names that configs share; a config takes those that it has.
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "dropout": 0.0,
    "dropout_rate": 0.0,
    "hidden_dropout": 0.0,
    "moe_token_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "use_cache": False,
    "output_router_logits": False,
}


@dataclass(frozen=True)
class Family:
    name: str  # the folder in transformers.models
    config: str
    model: str
    more: dict[str, Any] = field(default_factory=dict)

    def build(self, **more: Any) -> Any:
        """The model with its own random weights, experts computed one by one."""
        configs = importlib.import_module(f"transformers.models.{self.name}.configuration_{self.name}")
        models = importlib.import_module(f"transformers.models.{self.name}.modeling_{self.name}")
        kind = getattr(configs, self.config)
        known = set(kind.__dataclass_fields__) if hasattr(kind, "__dataclass_fields__") else set()
        given = {name: value for name, value in SMALL.items() if name in known}
        config = kind(**given | self.more | more)
        config._experts_implementation = "eager"
        config._attn_implementation = "eager"
        return getattr(models, self.model)(config)


MLA = {"num_key_value_heads": 4}
SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
INDEX = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
LINEAR = {"linear_head_dim": 8, "linear_num_heads": 2}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILIES = {
    family.name: family
    for family in (
        Family("afmoe", "AfmoeConfig", "AfmoeForCausalLM"),
        Family("aria", "AriaTextConfig", "AriaTextForCausalLM"),
        Family("axk1", "AXK1Config", "AXK1ForCausalLM", MLA),
        Family("axk2", "AXK2Config", "AXK2ForCausalLM", MLA),
        Family("bailing_hybrid", "BailingHybridConfig", "BailingHybridForCausalLM"),
        Family("beam", "BeamConfig", "BeamForCausalLM", SPARSE),
        Family("cohere2_moe", "Cohere2MoeConfig", "Cohere2MoeForCausalLM"),
        Family("deepseek_ocr2", "DeepseekOcr2TextConfig", "DeepseekOcr2TextModel", SPARSE),
        Family("deepseek_v2", "DeepseekV2Config", "DeepseekV2ForCausalLM", MLA),
        Family("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", MLA),
        Family("deepseek_v32", "DeepseekV32Config", "DeepseekV32ForCausalLM", MLA | INDEX),
        Family(
            "deepseek_v4",
            "DeepseekV4Config",
            "DeepseekV4ForCausalLM",
            {
                "o_groups": 2,
                "o_lora_rank": 8,
                "num_key_value_heads": 1,
                "mlp_layer_types": ["hash_moe", "moe"],
            }
            | INDEX,
        ),
        Family(
            "diffusion_gemma",
            "DiffusionGemmaTextConfig",
            "DiffusionGemmaEncoderTextModel",
            {"global_head_dim": 8},
        ),
        Family("dots1", "Dots1Config", "Dots1ForCausalLM", {"n_shared_experts": 1}),
        Family("ernie4_5_moe", "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
        Family(
            "ernie4_5_vl_moe",
            "Ernie4_5_VLMoeTextConfig",
            "Ernie4_5_VLMoeTextModel",
            SPARSE
            | {
                "moe_intermediate_size": [16, 12],
                "moe_num_shared_experts": 1,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
        ),
        Family("exaone_moe", "ExaoneMoeConfig", "ExaoneMoeForCausalLM"),
        Family("flex_olmo", "FlexOlmoConfig", "FlexOlmoForCausalLM"),
        Family("flint", "FlintConfig", "FlintForCausalLM", {"mlp_only_layers": []}),
        Family(
            "gemma4",
            "Gemma4TextConfig",
            "Gemma4ForCausalLM",
            {
                "enable_moe_block": True,
                "global_head_dim": 8,
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 64,
            },
        ),
        Family("glm4_moe", "Glm4MoeConfig", "Glm4MoeForCausalLM"),
        Family("glm4_moe_lite", "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", MLA),
        Family(
            "glm4v_moe",
            "Glm4vMoeTextConfig",
            "Glm4vMoeTextModel",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [1, 1, 0],
                    "partial_rotary_factor": 0.5,
                }
            },
        ),
        Family(
            "glm5_next",
            "Glm5NextTextConfig",
            "Glm5NextTextModel",
            MLA
            | SPARSE
            | INDEX
            | LINEAR
            | {
                "qk_rope_head_dim": 0,
                "index_kpool": 2,
                "layer_types": ["linear_attention", "indexed_attention"],
            },
        ),
        Family("glm_moe_dsa", "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", MLA | INDEX),
        Family("gpt_oss", "GptOssConfig", "GptOssForCausalLM"),
        Family("granitemoe", "GraniteMoeConfig", "GraniteMoeForCausalLM"),
        Family("granitemoe_swa", "GraniteMoeSWAConfig", "GraniteMoeSWAForCausalLM"),
        Family(
            "granitemoehybrid",
            "GraniteMoeHybridConfig",
            "GraniteMoeHybridForCausalLM",
            {
                "mamba_n_heads": 4,
                "mamba_d_state": 8,
                "shared_intermediate_size": 16,
                "mamba_chunk_size": 8,
                "layer_types": ["linear_attention", "full_attention"],
            },
        ),
        Family("granitemoeshared", "GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM"),
        Family("hunyuan_v1_moe", "HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM"),
        Family("hy_v3", "HYV3Config", "HYV3ForCausalLM", SPARSE),
        Family("hy_v4", "HYV4Config", "HYV4ForCausalLM", SPARSE),
        Family(
            "inkling",
            "InklingTextConfig",
            "InklingForCausalLM",
            {
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 2,
                "swa_head_dim": 8,
                "d_rel": 4,
                "rel_extent": 16,
                "n_shared_experts": 2,
            },
        ),
        Family(
            "jamba",
            "JambaConfig",
            "JambaForCausalLM",
            {
                "mamba_d_state": 4,
                "mamba_dt_rank": 4,
                "use_mamba_kernels": False,
                "attn_layer_offset": 0,
                "attn_layer_period": 2,
                "expert_layer_period": 1,
                "expert_layer_offset": 0,
            },
        ),
        Family(
            "kimi_linear",
            "KimiLinearConfig",
            "KimiLinearForCausalLM",
            MLA
            | SPARSE
            | LINEAR
            | {"q_lora_rank": None, "layer_types": ["linear_attention", "full_attention"]},
        ),
        Family("kolibri1", "Kolibri1Config", "Kolibri1ForCausalLM"),
        Family("laguna", "LagunaConfig", "LagunaForCausalLM", SPARSE),
        Family(
            "lfm2_moe", "Lfm2MoeConfig", "Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"]}
        ),
        Family("mellum", "MellumConfig", "MellumForCausalLM"),
        Family("mimo_v2_flash", "MiMoV2FlashConfig", "MiMoV2FlashForCausalLM", SPARSE),
        Family("minimax", "MiniMaxConfig", "MiniMaxForCausalLM"),
        Family("minimax_m2", "MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
        Family(
            "minimax_m3_vl",
            "MiniMaxM3VLTextConfig",
            "MiniMaxM3VLForCausalLM",
            INDEX | {"rotary_dim": 4, "shared_intermediate_size": 16, "dense_intermediate_size": 16},
        ),
        Family("mistral4", "Mistral4Config", "Mistral4ForCausalLM", MLA),
        Family("mistral_large4", "MistralLarge4TextConfig", "MistralLarge4TextModel", MLA),
        Family("mixtral", "MixtralConfig", "MixtralForCausalLM"),
        Family("muse_spark", "MuseSparkTextConfig", "MuseSparkTextModel", {"moe_hidden_size": 16}),
        Family(
            "nemotron_h",
            "NemotronHConfig",
            "NemotronHForCausalLM",
            {
                "ssm_state_size": 8,
                "mamba_num_heads": 4,
                "mamba_head_dim": 16,
                "n_groups": 2,
                "chunk_size": 8,
                "moe_shared_expert_intermediate_size": 16,
                "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            },
        ),
        Family("olmoe", "OlmoeConfig", "OlmoeForCausalLM"),
        Family(
            "openai_privacy_filter", "OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterForTokenClassification"
        ),
        Family("phimoe", "PhimoeConfig", "PhimoeForCausalLM"),
        Family("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
        Family("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", DELTA),
        Family("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        Family("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", DELTA),
        Family("qwen3_omni_moe", "Qwen3OmniMoeTextConfig", "Qwen3OmniMoeThinkerTextModel"),
        Family("qwen3_vl_moe", "Qwen3VLMoeTextConfig", "Qwen3VLMoeTextModel"),
        Family(
            "qwen4_exp",
            "Qwen4ExpTextConfig",
            "Qwen4ExpForCausalLM",
            DELTA | {"hc_count": 2, "hc_lowrank": 4, "layer_types": ["linear_attention", "linear_attention"]},
        ),
        Family("solar_open", "SolarOpenConfig", "SolarOpenForCausalLM"),
        Family(
            "unlimited_ocr",
            "UnlimitedOcrTextConfig",
            "UnlimitedOcrTextModel",
            SPARSE | {"num_key_value_heads": 4},
        ),
        Family("zaya", "ZayaConfig", "ZayaForCausalLM", {"num_experts_per_tok": 1, "router_hidden_size": 8}),
        Family(
            "dbrx",
            "DbrxConfig",
            "DbrxForCausalLM",
            {
                "d_model": 32,
                "n_heads": 4,
                "n_layers": 2,
                "max_seq_len": 64,
                "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
                "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": EXPERTS, "moe_top_k": 2},
            },
        ),
        Family("jetmoe", "JetMoeConfig", "JetMoeForCausalLM", {"kv_channels": 8}),
        Family(
            "llama4",
            "Llama4TextConfig",
            "Llama4ForCausalLM",
            {"intermediate_size_mlp": 16, "interleave_moe_layer_step": 1},
        ),
        Family(
            "longcat_flash",
            "LongcatFlashConfig",
            "LongcatFlashForCausalLM",
            {
                "num_layers": 2,
                "head_dim": 4,
                "num_key_value_heads": 4,
                "ffn_hidden_size": 16,
                "expert_ffn_hidden_size": 16,
                "zero_expert_num": 3,
                "moe_topk": 3,
            },
        ),
        Family(
            "nllb_moe",
            "NllbMoeConfig",
            "NllbMoeForConditionalGeneration",
            {
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_ffn_dim": 16,
                "decoder_ffn_dim": 16,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_sparse_step": 1,
                "decoder_sparse_step": 1,
                "init_std": 0.3,
                "encoder_layerdrop": 0.0,
                "decoder_layerdrop": 0.0,
            },
        ),
        Family(
            "step3p7",
            "Step3p7TextConfig",
            "Step3p7TextModel",
            SPARSE | {"share_expert_dim": 16, "swiglu_limits": [0.5, None]},
        ),
        Family(
            "switch_transformers",
            "SwitchTransformersConfig",
            "SwitchTransformersForConditionalGeneration",
            {
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 16,
                "num_layers": 2,
                "num_decoder_layers": 2,
                "num_sparse_encoder_layers": 2,
                "num_sparse_decoder_layers": 1,
                "num_heads": 4,
                "expert_capacity": 3,
            },
        ),
        Family("doge", "DogeConfig", "DogeForCausalLM", {"is_moe": True, "num_experts": 16}),
    )
}
