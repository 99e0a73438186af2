"""ModelSpec: what it refuses, and what it reads from Hugging Face configs of many families."""

import pytest

from moeyard.errors import InvalidModel
from moeyard.model import ModelSpec, num_experts, top_k

BASE = {"row_bytes": 100, "expert_bytes": 1000, "expert_flops": 1e3, "flops": 1e6}

# family: (experts, top-k, MoE layers, parameters of one routed expert), counted in the models built from these configs
FAMILIES = {
    "aria_text": (8, 2, 32, 50_331_648),
    "bailing_hybrid": (512, 8, 40, 5_898_240),
    "cohere2_moe": (8, 2, 40, 553_648_128),
    "deepseek_v3": (256, 8, 58, 44_040_192),
    "ernie4_5_moe": (64, 6, 27, 11_796_480),
    "exaone_moe": (64, 8, 31, 12_582_912),
    "flex_olmo": (7, 5, 32, 135_266_304),
    "glm4_moe": (128, 8, 45, 17_301_504),
    "gpt_oss": (128, 4, 36, 24_883_200),  # and 8640 biases
    "granitemoe": (8, 2, 32, 135_266_304),
    "jamba": (16, 2, 16, 176_160_768),
    "llama4_text": (16, 1, 48, 125_829_120),
    "minimax_m2": (256, 8, 62, 14_155_776),
    "mixtral": (8, 2, 32, 176_160_768),
    "nemotron_h": (8, 2, 1, 62_980_096),
    "nllb-moe": (128, 2, 6, 8_388_608),  # and 5120 biases
    "olmoe": (64, 8, 16, 12_582_912),
    "phimoe": (16, 2, 32, 78_643_200),
    "qwen2_moe": (60, 4, 24, 8_650_752),
    "qwen3_moe": (128, 8, 24, 4_718_592),
    "qwen3_next": (512, 10, 48, 3_145_728),
    "solar_open": (128, 8, 48, 15_728_640),
    "switch_transformers": (8, 1, 6, 3_145_728),
    "zaya": (16, 1, 40, 12_582_912),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_reads_the_family(family):
    transformers = pytest.importorskip("transformers", reason="needs transformers for its configs")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = transformers.CONFIG_MAPPING[family]()
    experts, chosen, layers, weights = FAMILIES[family]
    spec = ModelSpec.from_config(config, tokens_per_rank=1000)
    assert (num_experts(config), top_k(config), spec.layers) == (experts, chosen, layers)
    assert spec.expert_bytes == spec.gradient_bytes == 2 * weights
    assert spec.optimizer_bytes == 12 * weights
    assert spec.expert_flops == 2 * weights
    assert spec.non_moe_forward > 0
    assert spec.router > 0


def test_mixtral_by_hand():
    config = {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 2048,
    }  # fmt: skip
    spec = ModelSpec.from_config(config, flops=1e15, tokens_per_rank=10, gradient_dtype_bytes=4)
    assert spec.row_bytes == 8192
    assert spec.expert_bytes == 2 * 3 * 4096 * 14336
    assert spec.gradient_bytes == 2 * spec.expert_bytes
    assert spec.activation_bytes == 2 * (4096 + 3 * 14336)
    projections = 2 * 4096 * 4096 + 2 * 4096 * 1024
    scores = 2 * 4096 * 2048 / 2  # queries and values over half the context
    assert spec.non_moe_forward == pytest.approx(10 * (2 * projections + 2 * scores) / 1e15)
    assert spec.non_moe_backward == 2 * spec.non_moe_forward
    assert spec.router == pytest.approx(10 * 2 * 4096 * 8 / 1e15)
    assert ModelSpec.from_config(config).non_moe_forward == 0


def test_shared_experts_and_dense_layers_count_as_non_moe():
    config = {
        "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    plain = ModelSpec.from_config(config, flops=1e9, tokens_per_rank=1)
    shared = ModelSpec.from_config(config | {"n_shared_experts": 2}, flops=1e9, tokens_per_rank=1)
    assert shared.non_moe_forward - plain.non_moe_forward == pytest.approx(2 * 3 * 64 * 64 / 1e9)
    dense = ModelSpec.from_config(config | {"first_k_dense_replace": 2}, flops=1e9, tokens_per_rank=1)
    assert dense.layers == 2
    assert dense.non_moe_forward == pytest.approx(2 * plain.non_moe_forward + 2 * 3 * 64 * 128 / 1e9)


def test_a_text_part_is_looked_into():
    inner = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_experts": 8}
    assert ModelSpec.from_config({"hidden_size": 7, "text_config": inner}).row_bytes == 128


def test_a_config_without_experts_is_an_error_that_names_what_was_sought():
    dense = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    with pytest.raises(InvalidModel, match=r"has none of num_local_experts, n_routed_experts, .*by hand"):
        ModelSpec.from_config(dense)


@pytest.mark.parametrize("value", [-64, 0, "64", 6.5])
def test_a_config_with_a_bad_number_is_an_error_that_names_it(value):
    config = {"hidden_size": value, "intermediate_size": 128, "num_hidden_layers": 2, "num_experts": 4}
    with pytest.raises(InvalidModel, match=rf"hidden_size is {value!r}; give a whole number"):
        ModelSpec.from_config(config)


def test_what_is_left_out_follows_the_expert():
    spec = ModelSpec(**BASE)
    assert (spec.gradient_bytes, spec.optimizer_bytes) == (1000, 6000)
    assert spec.but(expert_bytes=10).gradient_bytes == 10
    assert spec.but(expert_bytes=10, gradient_bytes=7).optimizer_bytes == 60
    assert spec.but(gradient_bytes=7).but(expert_bytes=10).gradient_bytes == 7
    assert spec.row_seconds == 1e-3


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("row_bytes", 0, "row_bytes must be a whole number of at least 1, got 0"),
        ("expert_bytes", 1.5, "expert_bytes must be a whole number of at least 1, got 1.5"),
        ("gradient_bytes", -3, "gradient_bytes must be a whole number of at least 1, got -3"),
        ("optimizer_bytes", -2, "optimizer_bytes must be a whole number of at least 0, got -2"),
        ("flops", float("nan"), "flops must be positive and finite, got nan"),
        ("router", -1.0, "router must be zero or more seconds and finite, got -1.0"),
    ],
)
def test_impossible_values_are_refused(field, value, message):
    with pytest.raises(InvalidModel) as error:
        ModelSpec(**BASE | {field: value})
    assert message in str(error.value)
