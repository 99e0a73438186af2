"""A Hugging Face model in one process and over the ranks: outputs, loss, every gradient and the clip norm, number by number."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from families import FAMILIES
from keep_float64 import KeepFloat64
from torch import nn
from torch.nn import functional

import moeyard.runtime as yr
from moeyard.assign import ASSIGNERS

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
LENGTH, MAX_NORM = 7, 0.5
MASKED_RANK = 1  # all its labels are ignored
REPLICAS = {
    "no replicas": ("static", None, "auto"),
    "replicas": ("quota", 1, "quota"),
}  # planner, slots, policy
REPLICAS |= {f"replicas, {policy}": ("quota", 1, policy) for policy in (*ASSIGNERS, "auto")}


@dataclass(frozen=True)
class Batch:
    """Whole sequences; rank r has `sequences[r]` of them."""

    tokens: torch.Tensor
    labels: torch.Tensor
    sequences: tuple[int, ...]

    @classmethod
    def random(cls, world: int, vocabulary: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        sequences = tuple(1 + rank % 3 for rank in range(world))
        shape = (sum(sequences), LENGTH)
        tokens = torch.randint(3, vocabulary, shape, generator=generator)
        labels = torch.randint(vocabulary, shape, generator=generator)
        labels[torch.rand(shape, generator=generator) < 0.2] = -100
        batch = cls(tokens, labels, sequences)
        labels[batch.share(MASKED_RANK % world)] = -100
        return batch

    def share(self, rank: int) -> slice:
        start = sum(self.sequences[:rank])
        return slice(start, start + self.sequences[rank])


def outputs_of(model, tokens):
    """Logits, or the last hidden state of a model without a head."""
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    found = model(input_ids=tokens, **more)
    logits = getattr(found, "logits", None)
    return found.last_hidden_state if logits is None else logits


def loss_sum(outputs, labels):
    kept = labels >= 0
    return functional.cross_entropy(outputs[kept], labels[kept] % outputs.shape[-1], reduction="sum")


def relative(found, expected):
    """Largest difference, relative to the largest expected value."""
    if found.shape != expected.shape:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    return float("inf") if error.isnan() else float(error)


def build(family, dtype, **more):
    """The unmodified model, every parameter stirred: no zero biases, no experts too quiet to see."""
    torch.manual_seed(5)
    model = FAMILIES[family].build(**more).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64).to(dtype), alpha=0.05)
    return model.train()


class Reference:
    """The unmodified model after one step on the whole batch."""

    def __init__(self, family, dtype, world, seed=3):
        self.model = build(family, dtype)
        self.start = copy.deepcopy(self.model)
        self.batch = Batch.random(world, 60, seed)
        self.labels = int((self.batch.labels >= 0).sum())
        self.outputs = outputs_of(self.model, self.batch.tokens)
        loss = loss_sum(self.outputs, self.batch.labels) / self.labels
        loss.backward()
        self.loss = loss.item()
        self.grads = {
            name: None if p.grad is None else p.grad.clone() for name, p in self.model.named_parameters()
        }
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.clipped = {name: p.grad for name, p in self.model.named_parameters()}


def plain_gradients(model):
    """(plain name, this rank's gradient, how to see the same part of the plain gradient) of every parameter."""
    experts = dict(yr.expert_parameters(model))
    for name, parameter in yr.dense_parameters(model):
        yield name, parameter.grad, lambda whole: whole
    for prefix, module in yr.expert_modules(model):
        for stack in module.expert_share.stacks:
            grad = getattr(module, stack.name).grad
            assert f"{prefix}.{stack.name}" in experts
            for i, expert in enumerate(module.expert_share.own):
                key, part = stack.place(expert)
                shape = getattr(module, stack.name).shape[1:]
                own = None if grad is None else grad[i]
                yield (
                    f"{prefix}.{key}",
                    own,
                    lambda whole, part=part, shape=shape: (whole if part is None else whole[part]).view(
                        shape
                    ),
                )


def gradient_errors(model, expected):
    errors = {}
    for name, grad, part in plain_gradients(model):
        wanted = expected[name]
        if grad is None or wanted is None:
            given = next((g for g in (grad, wanted) if g is not None), None)
            # A stack that no token chose has a gradient of zeros here and None there, or the reverse.
            error = 0.0 if given is None or not given.abs().max() > 0 else float("inf")
        else:
            error = relative(grad, part(wanted))
        errors[name] = max(error, errors.get(name, 0.0))
    return errors


def compare(reference, yard, checkpointed=False):
    """{quantity: largest relative error} of one step over the ranks."""
    rank = dist.get_rank()
    model = yr.parallelize(copy.deepcopy(reference.start), yard)
    if checkpointed:
        checkpoint_in_float64(model)
    share = reference.batch.share(rank)
    labels = reference.batch.labels[share]
    outputs = outputs_of(model, reference.batch.tokens[share])
    loss = yr.global_mean(loss_sum(outputs, labels), int((labels >= 0).sum()), yard)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    yr.sync_gradients(model, yard)
    errors = {"outputs": relative(outputs, reference.outputs[share])}
    errors["loss"] = abs(total.item() - reference.loss) / abs(reference.loss)
    errors["gradients"] = worst(gradient_errors(model, reference.grads))
    norm = yr.clip_grad_norm_(model, MAX_NORM, yard)
    errors["norm"] = float(abs(norm - reference.norm) / reference.norm)
    errors["clipped"] = worst(gradient_errors(model, reference.clipped))
    return errors


def checkpoint_in_float64(model):
    """A function mode does not reach what the backward pass computes again, so it goes in with the checkpoint."""
    contexts = lambda: (contextlib.nullcontext(), KeepFloat64())  # noqa: E731
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


def worst(errors):
    return max(errors.values())


def liveliness(reference, model):
    """(experts with a gradient, experts) of the quietest module: a test of silent experts shows nothing."""
    seen = []
    for prefix, module in yr.expert_modules(model):
        stack = module.expert_share.stacks[-1]
        hit = 0
        for expert in range(module.expert_share.num_experts):
            key, part = stack.place(expert)
            grad = reference.grads[f"{prefix}.{key}"]
            grad = None if grad is None else (grad if part is None else grad[part])
            hit += grad is not None and bool(grad.abs().max() > 1e-9)
        seen.append(hit)
    return seen


def check_family(yard, world, family, dtype, cases):
    """{case: {quantity: error}}, and under "experts" the number of experts with a gradient in each module."""
    reference = Reference(family, dtype, world)
    found = {}
    for case in cases:
        name, *besides = case.split(" + ")
        planner, slots, policy = REPLICAS[name]
        yard.choose(planner=planner, slots=slots, policy=policy, dedup="once" in besides)
        yard.workspace.clear()
        found[case] = compare(reference, yard, "checkpointing" in besides)
        if name != "no replicas":
            held = torch.tensor(yard.workspace.held_bytes)
            dist.all_reduce(held)
            assert held > 0, f"{family}: no replica was ever used"
    found["experts"] = liveliness(reference, yr.parallelize(copy.deepcopy(reference.start), yard))
    return found


def how_found(model):
    """By which way of the runtime a family's experts are computed."""
    from moeyard.runtime.hf.adapters import ADAPTERS
    from moeyard.runtime.hf.compute import on_interface

    ways = []
    for name, module in model.named_modules():
        if on_interface(module):
            flags = {
                "no gate": not module.has_gate,
                "bias": module.has_bias,
                "transposed": module.is_transposed,
            }
            flags["norm"] = getattr(module, "has_post_expert_norm", False)
            ways.append(", ".join(["interface", *(flag for flag, on in flags.items() if on)]))
        else:
            ways += [f"adapter {adapter.__name__}" for adapter in ADAPTERS if adapter(name, module)]
    return " and ".join(dict.fromkeys(ways))


def split_error(family, world, rank):
    """How much the unmodified model itself changes when its batch is split over the ranks."""
    with KeepFloat64(), torch.no_grad():
        model, batch = build(family, torch.float64), Batch.random(world, 60, 3)
        share = batch.share(rank)
        return relative(outputs_of(model, batch.tokens[share]), outputs_of(model, batch.tokens)[share])


def families(rank, world, names, dtype_name="float64", cases=("no replicas", "replicas")):
    """{family: what `check_family` finds} on one yard. An error of any of them ends it."""
    dtype = getattr(torch, dtype_name)
    torch.set_default_dtype(dtype)
    keep = KeepFloat64() if dtype == torch.float64 else contextlib.nullcontext()
    with keep, yr.Yard(cluster=cluster_of(world), scheduler="fast", timeout=30) as yard:
        return {name: check_family(yard, world, name, dtype, cases) for name in names}


def one_family(rank, world, family, dtype_name="float64", cases=("no replicas", "replicas")):
    """What `check_family` finds and how; or why it did not: a table has a line for it."""
    calls = count_grouped_matmuls()
    try:
        found = families(rank, world, [family], dtype_name, cases)[family]
        with torch.device("meta"):
            return found | {"how": how_found(FAMILIES[family].build()), "grouped": calls[0]}
    except Exception as error:
        torch.set_default_dtype(torch.float64)
        return {"error": f"{type(error).__name__}: {error}", "split": split_error(family, world, rank)}


def count_grouped_matmuls():
    calls, plain = [0], functional.grouped_mm

    def counted(*args, **kwargs):
        calls[0] += 1
        return plain(*args, **kwargs)

    functional.grouped_mm = counted
    return calls


def cluster_of(world):
    import moeyard as my

    return my.Cluster(2, world // 2, scale_up=my.Port(4e11, 1e-6), scale_out=my.Port(5e10, 2e-6))


def prepare(names=tuple(FAMILIES)):
    """Import what the ranks need, and compile the planning kernels, before the fork."""
    import importlib

    import numpy as np
    import transformers

    import moeyard as my

    transformers.utils.logging.set_verbosity_error()
    for name in names:
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    cluster = cluster_of(4)
    demand = my.Demand(np.random.default_rng(0).integers(0, 9, (4, 6)))
    for planner, slots, policy in REPLICAS.values():
        served = my.assign(cluster, demand, my.place(cluster, demand, planner, slots), policy)
        schedule = my.schedule(cluster, served.traffic(8), "fast")
        my.lower(schedule, 0), my.lower(schedule.reversed(), 0)
