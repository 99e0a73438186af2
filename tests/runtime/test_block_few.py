"""Matmuls that gather their rows, for few rows an expert, on a GPU: against float64, at odd sizes, layouts and places."""

import math

import pytest

torch = pytest.importorskip("torch")
from block_oracle import by_expert, error, make  # noqa: E402
from test_block import LIMIT, assert_close, run  # noqa: E402

from moeyard.runtime.block import expert_block  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10),
        reason="no Hopper or datacenter Blackwell",
    ),
]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that the allocator hands out holds NaN: what is not written shows."""
    held = [torch.full((1 << size,), math.nan, device="cuda") for size in range(7, 22) for _ in range(6)]
    del held


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The matmuls that were asked for."""
    few = pytest.importorskip("moeyard.runtime.block.few")
    found = []
    for name in ("gate_up", "times", "outer"):
        made = getattr(few, name)
        monkeypatch.setattr(
            few,
            name,
            lambda *given, made=made, name=name, **named: found.append(name) or made(*given, **named),
        )
    return found


def check(case, dtype=BF16, **options):
    assert_close(run(case, dtype, "cuda", **options), by_expert(case, device="cuda"), LIMIT[dtype])


SHAPES = [  # tokens, hidden, inner, experts, top-k
    (64, 256, 128, 8, 2),
    (20, 256, 192, 16, 4),
    (1, 64, 32, 4, 2),
    (33, 50, 30, 5, 2),
    (9, 17, 1, 3, 2),
    (40, 1, 8, 3, 2),
    (100, 136, 72, 2, 1),
    (300, 520, 264, 20, 4),
    (40, 64, 32, 1, 1),
    (90, 64, 32, 1000, 8),
]


@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_all_gradients(shape, transposed, calls):
    check(make(*shape, seed=1), transposed=transposed)
    assert sorted(calls) == ["gate_up", "outer", "outer", "times", "times", "times"]


def test_float16(monkeypatch):
    monkeypatch.setitem(LIMIT, torch.float16, 2e-3)
    check(make(60, 64, 48, 5, 3, dtype=torch.float16), torch.float16)


@pytest.mark.parametrize(("low", "high"), [(0, 3), (-1, 4), (2, 3), (-2, 0)])
def test_odd_choices(low, high, calls):
    """Twice the same, outside, all one expert, none at all."""
    index = torch.randint(low, high, (40, 4), generator=torch.Generator().manual_seed(1))
    case = make(40, 64, 32, 3, 4, index=index)
    check(case)
    assert calls
    _, grads = run(case, BF16, "cuda")
    assert not grads["weights"][((index < 0) | (index > 2)).cuda()].any()
    for e in set(range(3)) - set(index.flatten().tolist()):
        assert not grads["gate_up"][e].any()
        assert not grads["down"][e].any()


def test_only_what_is_needed_is_made(calls):
    given, index, d_y = make(40, 64, 32, 5, 2).leaves(BF16, "cuda")
    given["gate_up"].requires_grad_(False)
    given["down"].requires_grad_(False)
    y = expert_block(given["x"], index, given["weights"], given["gate_up"], given["down"])
    y.backward(d_y)
    assert "outer" not in calls
    assert given["x"].grad.isfinite().all()


def test_a_kept_graph_gives_the_same_twice(calls):
    given, index, d_y = make(40, 64, 32, 5, 2).leaves(BF16, "cuda")
    leaves = list(given.values())
    y = expert_block(given["x"], index, given["weights"], given["gate_up"], given["down"])
    first = torch.autograd.grad(y, leaves, d_y, retain_graph=True)
    again = torch.autograd.grad(y, leaves, d_y)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_places_that_are_not_aligned(calls):
    """A kernel that was compiled for aligned memory is not launched on other."""
    case = make(40, 64, 32, 5, 2)
    check(case)
    given, index, d_y = case.leaves(BF16, "cuda")
    shifted = {}
    for name, leaf in given.items():
        room = torch.empty(leaf.numel() + 1, dtype=BF16, device="cuda")
        room[1:] = leaf.detach().flatten()
        shifted[name] = room[1:].view(leaf.shape).requires_grad_()
    assert shifted["x"].data_ptr() % 16
    y = expert_block(shifted["x"], index, shifted["weights"], shifted["gate_up"], shifted["down"])
    y.backward(d_y)
    found = y, {name: leaf.grad for name, leaf in shifted.items()}
    assert_close(found, by_expert(case, device="cuda"), LIMIT[BF16])


def test_a_choice_outside_is_refused_by_the_device():
    """In a process of its own: the device is lost to it afterwards."""
    import subprocess
    import sys

    for tokens in (5, 2000):
        text = (
            "import torch; from moeyard.runtime.block import expert_block; g = dict(device='cuda', dtype=torch.bfloat16)\n"
            f"for bad in (3, 4):\n"
            f"    index = torch.zeros({tokens}, 2, device='cuda', dtype=torch.int64); index[-1, 1] = bad\n"
            f"    expert_block(torch.randn({tokens}, 64, **g), index, torch.rand({tokens}, 2, **g), torch.randn(4, 64, 64, **g), "
            "torch.randn(4, 64, 32, **g), refuse='no such expert')\n"
            "    torch.cuda.synchronize(); print('fine', bad)\n"
        )
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
        assert "fine 3" in done.stdout
        assert "fine 4" not in done.stdout
        assert "no such expert" in done.stdout + done.stderr


def test_more_elements_than_an_int32_counts():
    from moeyard.runtime.block import few
    from moeyard.runtime.block.plain import PlainParts

    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free device memory")
    tokens, high, wide = 39_000, 57_344, 16
    routing = PlainParts().route(torch.randint(0, 2, (tokens, 1), device="cuda"), 2)
    left, right = (torch.randn(tokens, width, device="cuda", dtype=BF16) for width in (high, wide))
    assert left.numel() > 2**31
    for gathered in ((False, True), (True, False)):
        found = few.outer(left, right, routing, gathered=gathered)
        token, (end, _) = routing.pair.long(), routing.ends.tolist()
        some = slice(high - 256, high)
        rows = [
            side[token] if there else side
            for side, there in zip((left[:, some], right), gathered, strict=True)
        ]
        wanted = rows[0][end:].double().T @ rows[1][end:].double()
        assert float((found[1, some] - wanted).norm() / wanted.norm()) < LIMIT[BF16]


@pytest.mark.parametrize("tokens", [30, 300], ids=["few rows", "many rows"])
def test_odd_views(tokens, calls):
    """int32 choices, a gradient that is one number everywhere, stacks and tokens that lie apart, no weights."""
    case = make(tokens, 64, 32, 5, 2)
    given, index, _ = case.leaves(BF16, "cuda")
    apart = torch.empty(tokens, 100, device="cuda", dtype=BF16)
    apart[:, 3:67] = given["x"].detach()
    x = apart[:, 3:67].requires_grad_()
    gate_up = given["gate_up"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    plain = expert_block(given["x"], index, None, given["gate_up"], given["down"], kernels="plain")
    plain.sum().backward()
    y = expert_block(x, index.int(), None, gate_up, given["down"].detach().requires_grad_())
    y.sum().backward()
    assert bool(calls) == (tokens == 30)
    pairs = ((y, plain), (x.grad, given["x"].grad), (gate_up.grad, given["gate_up"].grad))
    for found, wanted in pairs:
        assert error(found, wanted.detach().double().cpu()) < LIMIT[BF16]
