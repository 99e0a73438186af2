"""`MoELayer` without a process group: initial values, all experts on one rank, adapters."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from torch.nn.utils import parametrize  # noqa: E402

from moeyard.errors import InvalidModel  # noqa: E402
from moeyard.runtime.block import expert_block  # noqa: E402
from moeyard.runtime.hf.parallelize import ExpertNames  # noqa: E402
from moeyard.runtime.layers.experts import MoELayer, TopKRouter  # noqa: E402
from moeyard.runtime.layers.share import refuse_altered  # noqa: E402


def place_of(rank, size):
    return SimpleNamespace(rank=rank, size=size, device=torch.device("cpu"), next_site=lambda: 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_a_layer_begins_alike_on_any_number_of_ranks(ranks):
    def layer(rank, size, seed=4):
        return MoELayer(6, 10, 5, 2, place_of(rank, size), seed=seed, dtype=torch.bfloat16)

    whole, other = layer(0, 1), layer(0, 1, seed=5)
    for rank in range(ranks):
        share = layer(rank, ranks)
        for name in ("gate_up", "down"):
            assert torch.equal(getattr(share, name), getattr(whole, name)[share.own])
    assert not torch.equal(whole.gate_up, other.gate_up)
    assert not torch.equal(whole.gate_up.flatten()[:50], whole.down.flatten()[:50])


@pytest.mark.parametrize("normalise", [True, False])
def test_a_router_takes_the_likeliest_and_says_how_likely(normalise):
    """Against softmax, top-k and quotient one after another, gradients too."""
    torch.manual_seed(3)
    router = TopKRouter(6, 9, 3, normalise=normalise, dtype=torch.float64)
    x = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    state = router(x)
    likely = (x @ router.weight.T).exp()
    likely = likely / likely.sum(-1, keepdim=True)
    weights, index = torch.sort(likely, dim=-1, descending=True)
    weights, index = weights[:, :3], index[:, :3]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    assert torch.equal(state.index, index)
    for found, wanted in ((state.weights, weights), (state.probabilities, likely)):
        assert torch.allclose(found, wanted, rtol=1e-12, atol=0)
    given = torch.randn(20, 3, dtype=torch.float64)
    leaves = (x, router.weight)
    for found, wanted in zip(
        torch.autograd.grad(state.weights, leaves, given),
        torch.autograd.grad(weights, leaves, given),
        strict=True,
    ):
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-13)


def test_a_layer_whose_experts_are_all_here_refuses_what_is_no_expert():
    layer = MoELayer(6, 10, 5, 2, place_of(0, 1))
    x, weights = torch.randn(3, 6), torch.full((3, 2), 0.5)
    index = torch.tensor([[0, 1], [4, 2], [3, 0]])
    found = layer.alone(x, index, weights)
    assert torch.equal(found, expert_block(x, index, weights, layer.gate_up, layer.down))
    for wrong in (5, -1):
        with pytest.raises(RuntimeError, match=r"MoELayer .*: a router chose an expert outside 0\.\.4"):
            layer.alone(x, index.masked_fill(index == 4, wrong), weights)


def test_adapters_that_come_later_are_left_out_of_ddp():
    model = torch.nn.ModuleDict({"moe": MoELayer(6, 10, 5, 2, place_of(0, 1))})
    names = ExpertNames(model)
    assert set(names) == {"moe.gate_up", "moe.down"}

    class Adapter(torch.nn.Module):
        def __init__(self, experts):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(experts, 1, 1))

        def forward(self, stack):
            return stack * self.factor

    parametrize.register_parametrization(model["moe"], "down", Adapter(5))
    adapted = {"moe.parametrizations.down.original", "moe.parametrizations.down.0.factor"}
    assert set(names) == {"moe.gate_up"} | adapted
    parametrize.register_parametrization(model["moe"], "gate_up", Adapter(1))
    with pytest.raises(
        InvalidModel, match=r"parametrizations\.gate_up\.0\.factor is \[1, 1, 1\] for 5 experts"
    ):
        list(names)
    with pytest.raises(InvalidModel, match=r"moe\.gate_up is parametrized; move experts before"):
        refuse_altered("moe", model["moe"], "move experts")
