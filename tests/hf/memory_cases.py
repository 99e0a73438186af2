"""What a rank holds at most while its share of a model is made: measured in a process that made nothing before."""

from __future__ import annotations

from pathlib import Path

import torch

import moeyard.runtime as yr


def prepare():
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401


def peak_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def forget_peak():
    """From now on the peak counts from what is held now."""
    Path("/proc/self/clear_refs").write_text("5")


def model_of(layers, hidden, inner, experts):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=2000,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=experts,
    )
    with torch.device("meta"):
        return MixtralForCausalLM(config)


def build(rank, world, layers, hidden, inner, experts):
    """(bytes of this rank's share, bytes of the whole model, peak above the interpreter's base)."""
    with yr.Yard(scheduler="direct", timeout=60) as yard:
        warm = model_of(1, 8, 8, experts)  # what the first build imports and caches is no part of the model
        yr.initialise(yr.parallelize(warm, yard), yard)
        del warm
        forget_peak()
        base = peak_bytes()
        model = model_of(layers, hidden, inner, experts)
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        yr.initialise(yr.parallelize(model, yard), yard)
        peak = peak_bytes() - base
        share = sum(p.numel() * p.element_size() for p in model.parameters())
        checks = float(model.model.layers[-1].mlp.experts.down_proj.detach().std())
    return {"share": share, "whole": whole, "peak": peak, "std": checks}
