"""The EPLB drop-in: shapes, meaning, balance against the best possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeyard.eplb import balancedness_of, rebalance_experts
from moeyard.errors import InvalidDemand, InvalidPlacement


@st.composite
def jobs(draw):
    """(weight, replicas, groups, nodes, gpus) that EPLB accepts."""
    nodes, local, per_node, size = (draw(st.integers(1, 3)) for _ in range(4))
    groups, gpus = nodes * per_node, nodes * local
    experts = groups * size
    slots = draw(st.integers(-(-experts // gpus), max(-(-experts // gpus), experts // nodes)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weight = rng.integers(0, draw(st.sampled_from([1, 2, 100])), (3, experts)) ** 2
    return weight, slots * gpus, groups, nodes, gpus


@given(job=jobs())
@settings(max_examples=60, deadline=None)
def test_maps_agree_and_groups_stay_whole(job):
    weight, replicas, groups, nodes, gpus = job
    experts = weight.shape[1]
    phys, log, count = rebalance_experts(*job)
    assert phys.shape == (3, replicas)
    assert log.shape == (3, experts, count.max())
    assert phys.dtype == log.dtype == count.dtype == np.int64
    assert (count.sum(axis=1) == replicas).all()
    for layer in range(3):
        for gpu in phys[layer].reshape(gpus, -1):
            assert len(set(gpu)) == len(gpu)  # never two copies of an expert
        for e in range(experts):
            slots = log[layer, e][log[layer, e] >= 0]
            assert len(slots) == count[layer, e] >= 1
            assert (phys[layer, slots] == e).all()
        node_of = log[layer, :, 0] // (replicas // nodes)
        for group in node_of.reshape(groups, -1):
            assert len(set(group)) == 1
        for e in range(experts):
            slots = log[layer, e][log[layer, e] >= 0]
            assert (slots // (replicas // nodes) == node_of[e]).all()


def zipf(layers, experts, skew, seed=0):
    rng = np.random.default_rng(seed)
    share = np.arange(1, experts + 1.0) ** -skew
    share /= share.sum()
    return np.stack([rng.multinomial(1_000_000, rng.permutation(share)) for _ in range(layers)])


@pytest.mark.parametrize("skew", [0.5, 0.8, 1.0, 1.2])
def test_with_groups_within_three_percent_of_the_ceiling(skew):
    weight = zipf(58, 256, skew)
    phys, _, _ = rebalance_experts(weight, 288, 8, 4, 32)
    groups = np.sort(weight.reshape(58, 8, -1).sum(axis=2), axis=1)
    heaviest = (groups + groups[:, ::-1]).max(
        axis=1
    )  # two groups a node: the best pairing is heaviest with lightest
    ceiling = (weight.sum(axis=1) / 4 / heaviest).mean()
    assert balancedness_of(weight, phys, 32).mean() >= 0.97 * ceiling


@pytest.mark.parametrize("skew", [0.5, 0.8, 1.0])
@pytest.mark.parametrize(("layers", "replicas", "gpus"), [(61, 320, 64), (58, 288, 32)])
def test_without_groups(layers, replicas, gpus, skew):
    weight = zipf(layers, 256, skew)
    phys, _, _ = rebalance_experts(weight, replicas, 1, 1, gpus)
    assert balancedness_of(weight, phys, gpus).mean() >= 0.97


def test_groups_that_do_not_divide_bind_nothing():
    weight = zipf(2, 24, 1.0)
    free = rebalance_experts(weight, 32, 1, 1, 8)[0]
    assert (rebalance_experts(weight, 32, 3, 2, 8)[0] == free).all()


def test_tensors_in_tensors_out():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weight = torch.from_numpy(zipf(2, 16, 1.0)).float()
    found = rebalance_experts(weight, 24, 2, 2, 4)
    arrays = rebalance_experts(weight.numpy(), 24, 2, 2, 4)
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.dtype == torch.int64
        assert (tensor.numpy() == array).all()


def test_bad_input_is_one_line():
    with pytest.raises(InvalidPlacement, match="num_replicas is 9, which num_gpus 4 does not divide"):
        rebalance_experts(np.ones((1, 8)), 9, 1, 1, 4)
    with pytest.raises(InvalidPlacement, match="8 experts do not fit in 4 physical slots"):
        rebalance_experts(np.ones((1, 8)), 4, 1, 1, 4)
    with pytest.raises(InvalidPlacement, match="two copies of one on a gpu"):
        rebalance_experts(np.ones((1, 2)), 12, 1, 1, 4)
    with pytest.raises(InvalidDemand, match=r"weight\[0, 1\] is -1"):
        rebalance_experts(np.array([[1.0, -1.0]]), 2, 1, 1, 2)
    with pytest.raises(InvalidDemand, match="weight must be"):
        rebalance_experts(np.ones(4), 4, 1, 1, 2)
