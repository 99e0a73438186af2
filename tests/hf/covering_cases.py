"""One family for each way of computing experts, and what else a parallelized model must do."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import model_oracle
import torch
import torch.distributed as dist
from curve_cases import curve  # noqa: F401
from keep_float64 import KeepFloat64
from memory_cases import build as build_empty  # noqa: F401
from model_oracle import Batch, build, cluster_of, families, relative  # noqa: F401
from torch import nn

import moeyard as my
import moeyard.runtime as yr
from moeyard.errors import InvalidModel, InvalidPlacement

INTERFACE = {
    "mixtral": "gate",
    "nemotron_h": "no gate",
    "gpt_oss": "bias, transposed, interleaved gate",
    "aria": "transposed",
    "muse_spark": "norm behind each expert",
}
ADAPTERS = {
    "step3p7": "stacked without flags",
    "longcat_flash": "identity experts",
    "llama4": "pre-scaled inputs",
    "dbrx": "flat",
    "jetmoe": "sorted rows, also in attention",
    "switch_transformers": "dictionary, capacity",
    "nllb_moe": "dictionary with biases",
}


def known(family):
    """Whether this transformers has it: an older one has fewer."""
    return find_spec(f"transformers.models.{family}") is not None


def prepare():
    model_oracle.prepare(filter(known, (*INTERFACE, *ADAPTERS, "deepseek_v3", "qwen3_moe", "doge")))
    port = my.Port(1e9, 1e-6)
    cluster = my.Cluster(1, 2, scale_up=port, scale_out=port)  # as the examples of the docs find it
    traffic = my.Traffic([[1, 2], [3, 4]], 8)
    my.lower(my.schedule(cluster, traffic, "auto"), 0)


def others(rank, world):
    """Each case on one yard; {case: largest error}."""
    torch.set_default_dtype(torch.float64)
    with KeepFloat64(), yr.Yard(cluster=cluster_of(world), scheduler="fast", timeout=30) as yard:
        found = {case.__name__: case(rank, world, yard) for case in CASES}
    torch.set_default_dtype(torch.float32)
    with yr.Yard(cluster=cluster_of(world), scheduler="fast", timeout=30) as yard:
        found["autocast"] = autocast(rank, world, yard)
    return found


def own_loss(rank, world, yard):
    """The model's own labels, router loss and accumulation over two micro-batches, with checkpointing."""
    plain = build("mixtral", torch.float64, router_aux_loss_coef=0.5)
    ours = yr.parallelize(copy.deepcopy(plain), yard)
    model_oracle.checkpoint_in_float64(ours)
    batches = [Batch.random(world, 60, seed) for seed in (1, 2)]
    labels = sum(int((b.labels[:, 1:] >= 0).sum()) for b in batches)
    errors = []
    for batch in batches:
        mask = torch.ones_like(batch.tokens)
        mask[::2, -2:] = 0
        share = batch.share(rank)
        whole = plain(
            batch.tokens, mask, labels=batch.labels, num_items_in_batch=labels, output_router_logits=True
        )
        whole.loss.backward()
        part = ours(
            input_ids=batch.tokens[share],
            attention_mask=mask[share],
            labels=batch.labels[share],
            num_items_in_batch=labels,
            output_router_logits=True,
        )
        part.loss.backward()
        for name in ("loss", "aux_loss"):
            total = getattr(part, name).detach().clone()
            dist.all_reduce(total)
            errors.append(relative(total, getattr(whole, name)))
    yr.sync_gradients(ours, yard)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    return max(*errors, model_oracle.worst(model_oracle.gradient_errors(ours, expected)))


def router_loss_without_counts(rank, world, yard):
    """A router loss of one rank's tokens is refused, with the fix."""
    model = yr.parallelize(build("mixtral", torch.float64), yard)
    tokens = torch.full((1, 5), 7)
    call = lambda: model(tokens, labels=tokens, output_router_logits=True)  # noqa: E731
    refused(call, InvalidModel, "num_items_in_batch")
    return 0.0


def generate(rank, world, yard):
    """Greedy texts of unequal lengths on each rank are those of one process."""
    plain = build("qwen3_moe", torch.float64).eval()
    ours = yr.parallelize(copy.deepcopy(plain), yard)
    prompt = torch.arange(3, 8).unsqueeze(0) + 7 * rank
    options = {"do_sample": False, "use_cache": True, "max_new_tokens": 3 + 2 * rank, "eos_token_id": None}
    expected = plain.generate(prompt, **options)
    found = ours.generate(prompt, **options)
    return 0.0 if torch.equal(found, expected) else float("inf")


def homes(rank, world, yard):
    """Homes of one's own, a rank without experts; a copy of the model is expert-parallel too."""
    plain = build("deepseek_v3", torch.float64)
    home_E = torch.tensor([2, 2, 0, 1, 0, 2]).numpy()
    ours = copy.deepcopy(yr.parallelize(copy.deepcopy(plain), yard, homes=home_E))
    _, experts = next(yr.expert_modules(ours))
    assert len(experts.gate_up_proj) == len(experts.expert_share.own) == (2, 1, 3, 0)[rank]
    batch = Batch.random(world, 60, 4)
    share = batch.share(rank)
    return relative(ours(batch.tokens[share]).logits, plain(batch.tokens).logits[share])


def moved_homes(rank, world, yard):
    """AdamW steps with the homes changed in between are those without: parameters and optimizer state went along."""
    start = build("gpt_oss", torch.float64)
    logits = []
    for moves in (False, True):
        model = yr.parallelize(copy.deepcopy(start), yard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(4):
            if moves and step == 2:
                first = dict(yr.expert_modules(model))
                other = [0, 3, 0, 1, 3, 1]
                assert yr.move_experts(model, yard, torch.tensor(other).numpy(), optimizer) == 5 * len(first)
                assert all(
                    list(m.expert_share.own) == [e for e in range(6) if other[e] == rank]
                    for m in first.values()
                )
            batch = Batch.random(world, 60, step)
            own = batch.tokens[batch.share(rank)]
            model(own, labels=own, num_items_in_batch=batch.tokens[:, 1:].numel()).loss.backward()
            yr.sync_gradients(model, yard)
            optimizer.step()
            optimizer.zero_grad()
        logits.append(model(torch.arange(3, 11).view(2, 4)).logits)
    return relative(*logits)


def same_weights_on_any_ranks(rank, world, yard):
    """Built empty and initialised: a rank's experts are those of one that owns them all, and dense parameters are equal."""
    from transformers import GptOssConfig, GptOssForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_local_experts": 6}
    config = GptOssConfig(vocab_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=8, **small)
    models = []
    for home in (None, [0] * 6):
        with torch.device("meta"):
            empty = GptOssForCausalLM(config)
        models.append(yr.initialise(yr.parallelize(empty, yard, homes=home), yard, seed=3))
    spread, heaped = models
    _, a = next(yr.expert_modules(spread))
    _, b = next(yr.expert_modules(heaped))
    whole = b.gate_up_proj if rank == 0 else torch.empty(6, *b.gate_up_proj.shape[1:])
    whole = whole.detach().clone()
    dist.broadcast(whole, 0)
    assert float(whole.std()) > 0
    assert torch.equal(a.gate_up_proj, whole[list(a.expert_share.own)])
    assert all(not p.isnan().any() for p in spread.parameters())
    for (_, p), (_, q) in zip(yr.dense_parameters(spread), yr.dense_parameters(heaped), strict=True):
        assert torch.equal(p, q)
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(p, first)
    return 0.0


def refusals(rank, world, yard):
    """What cannot be done is an error that says what is missing and what to do."""
    model = yr.parallelize(build("mixtral", torch.float64), yard)
    cases = (
        (lambda: yr.parallelize(model, yard), InvalidModel, "already"),
        (lambda: model.save_pretrained("nowhere"), InvalidModel, "export_pretrained"),
        (lambda: yr.parallelize(build("doge", torch.float64), yard), InvalidModel, "DogeCDMoE"),
        (lambda: yr.parallelize(nn.Linear(2, 2), yard), InvalidModel, "no module with experts"),
        (
            lambda: yr.parallelize(build("mixtral", torch.float64), yard, homes=[9] * 6),
            InvalidPlacement,
            "0..3",
        ),
    )
    for call, kind, word in cases:
        refused(call, kind, word)
    experts = [module for _, module in yr.expert_modules(model)]
    choice = torch.zeros(3, 2, dtype=torch.int64)
    refused(lambda: experts[rank == 1](torch.randn(3, 32), choice, choice), yr.Mismatch, "different layers")
    return 0.0


def refused(call, kind, word):
    message = "nothing was refused"
    try:
        call()
    except kind as error:
        message = str(error)
    assert word in message, message


def autocast(rank, world, yard):
    """bf16 inside, float32 weights: as the one process under the same autocast, to bf16's precision."""
    plain = build("qwen3_moe", torch.float32)
    ours = yr.parallelize(copy.deepcopy(plain), yard)
    batch = Batch.random(world, 60, 6)
    share = batch.share(rank)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = ours(batch.tokens[share]).logits, plain(batch.tokens).logits[share]
    found.float().sum().backward()
    return relative(found, expected)


CASES = (
    own_loss,
    router_loss_without_counts,
    generate,
    homes,
    moved_homes,
    same_weights_on_any_ranks,
    refusals,
)
