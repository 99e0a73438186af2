"""The expert block on a GPU: Triton's kernels and torch's grouped matmul against float64, and no wait for the device."""

import math

import pytest

torch = pytest.importorskip("torch")
from block_oracle import by_expert, error, make, swiglu  # noqa: E402
from test_block import DTYPES, JOINS, LIMIT, assert_close, grouped, run  # noqa: E402

from moeyard.runtime.block import expert_block, initial_experts  # noqa: E402
from moeyard.runtime.block.plain import PlainParts  # noqa: E402
from moeyard.runtime.block.routing import Scale  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that the allocator hands out holds NaN: what is not written shows."""
    if torch.cuda.is_available():
        held = [torch.full((1 << 24,), math.nan, device="cuda") for _ in range(4)]
        held += [torch.full((1 << size,), math.nan, device="cuda") for size in range(7, 22) for _ in range(6)]
        del held


@pytest.fixture
def parts():
    pytest.importorskip("triton")
    from moeyard.runtime.block.triton_parts import TritonParts

    return TritonParts()


def check(case, dtype=BF16, true_join=swiglu, **options):
    wanted = by_expert(case, true_join, device="cuda")
    return assert_close(run(case, dtype, "cuda", **options), wanted, LIMIT[dtype])


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize(
    "shape",
    [(700, 256, 192, 16, 4), (129, 64, 40, 3, 3), (2000, 512, 768, 8, 2), (6000, 256, 192, 8, 4)],
    ids=str,
)
@pytest.mark.parametrize("worth", [0, 1 << 24], ids=["down last", "down first"])
def test_values_and_all_gradients(shape, bias, transposed, worth, monkeypatch):
    monkeypatch.setattr("moeyard.runtime.block.fused.WORTH", worth)
    check(make(*shape, bias=bias), transposed=transposed)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != BF16], ids=str)
def test_other_dtypes(dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    check(make(200, 64, 48, 5, 3, bias=True), dtype)


def test_odd_choices():
    generator = torch.Generator().manual_seed(1)
    for low, high in (
        (0, 3),
        (-1, 4),
        (2, 3),
        (-2, 0),
    ):  # twice the same, outside, all one expert, none at all
        index = torch.randint(low, high, (90, 4), generator=generator)
        case = make(90, 64, 32, 3, 4, index=index, bias=True)
        _, grads = run(case, BF16, "cuda")
        check(case)
        assert not grads["weights"][((index < 0) | (index > 2)).cuda()].any()


@pytest.mark.parametrize("width", [256, 80])
def test_choices_without_a_row(parts, width):
    """As where tokens cross to a node once: this rank has rows of some choices alone."""
    index = torch.randint(-3, 4, (90, 4), generator=torch.Generator().manual_seed(2)).cuda()
    plain = PlainParts()
    whole = plain.route(index, 4)
    some = whole._replace(pair=whole.pair[: int(whole.ends[-1])])
    x = torch.randn(90, width, device="cuda", dtype=BF16)
    rows = parts.spread(x, some)
    assert len(rows) == len(some.pair) < index.numel()
    assert torch.equal(rows, plain.spread(x, some))
    wanted = plain.gather_sum(rows.float(), some, None)
    assert torch.allclose(parts.gather_sum(rows.float(), some, None), wanted, rtol=1e-6)


def test_no_tokens():
    y, grads = run(make(0, 64, 32, 4, 2, bias=True), BF16, "cuda")
    assert y.shape == (0, 64)
    assert all(not grad.any() for grad in grads.values())


@pytest.mark.parametrize("name", JOINS)
def test_any_activation(name):
    join, options, width = JOINS[name]
    case = make(300, 64, 48, 6, 3, join_width=width, bias=True)
    check(case, true_join=join, **(options or {"join": join}))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_rows_grouped_by_expert(bias):
    ends = [40, 40, 110, 260]
    index = torch.full((300, 1), -1)
    for e, (at, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        index[at:end] = e
    case = make(300, 64, 32, 4, 1, index=index, bias=bias)
    case.weights = torch.ones_like(case.weights)
    wanted = by_expert(case)
    del wanted[1]["weights"]
    found = grouped(case, BF16, ends, "cuda")
    assert_close(found, wanted, LIMIT[BF16])
    assert not found[0][260:].any()
    assert not found[1]["x"][260:].any()


@pytest.mark.skipif(
    not HOPPER, reason="torch's grouped matmul waits for the device before compute capability 9"
)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it does not see all of them
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_the_host_never_waits(bias, activation):
    case = make(300, 64, 48, 6, 3, bias=bias)
    run(case, BF16, "cuda", activation=activation)
    given, index, d_y = case.leaves(BF16, "cuda")
    biases = {name: given.get(name) for name in ("gate_up_bias", "down_bias")}
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = expert_block(
            given["x"],
            index,
            given["weights"],
            given["gate_up"],
            given["down"],
            activation=activation,
            **biases,
        )
        y.backward(d_y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_twice_the_same_bits():
    case = make(700, 256, 192, 16, 4)
    (y, grads), (again, others) = run(case, BF16, "cuda"), run(case, BF16, "cuda")
    assert torch.equal(y, again)
    assert all(torch.equal(grads[name], others[name]) for name in grads)


@pytest.mark.parametrize("experts", [1, 3, 128, 1000])
def test_routing_is_that_of_plain_torch(parts, experts):
    for tokens in (1, 100, 600, 5000):
        index = torch.randint(-1, experts + 1, (tokens, 3), device="cuda")
        pairs = zip(parts.route(index, experts), PlainParts().route(index, experts), strict=True)
        for found, wanted in pairs:
            assert torch.equal(found, wanted)
            assert found.dtype == wanted.dtype


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [768, 100, 1024, 3072])
def test_parts_are_those_of_plain_torch(parts, dtype, width):
    plain, limit = PlainParts(), 1e-6 if dtype == torch.float32 else 8e-3
    index = torch.randint(-1, 8, (333, 3), device="cuda")
    routing, weights = plain.route(index, 7), torch.rand(333, 3, device="cuda")
    x = torch.randn(333, width, device="cuda", dtype=dtype)
    rows = plain.spread(x, routing)
    assert torch.equal(parts.spread(x, routing), rows)
    rows[int(routing.ends[-1]) :] = math.nan
    for given in (weights, None):
        wanted = plain.gather_sum(rows.double(), routing, given)
        assert error(parts.gather_sum(rows, routing, given), wanted.cpu()) < limit
    product, d_inner = (torch.randn(999, n, device="cuda", dtype=dtype) for n in (2 * width, width))
    assert error(parts.activate(product, None), plain.activate(product.double(), None).cpu()) < limit
    for scale in (None, Scale(weights, routing.pair)):
        given = (None, scale, routing.ends)
        wanted = plain.activate_back(product.double(), d_inner.double(), *given, over=False)
        for over in (False, True):
            found = parts.activate_back(product.clone(), d_inner.clone(), *given, over=over)
            for one, other in zip(found, wanted, strict=True):
                assert (one is None) == (other is None)
                assert one is None or error(one, other.cpu()) < limit


def test_many_choices(parts):
    index = torch.rand(40, 64, device="cuda").topk(24).indices
    routing = parts.route(index, 64)
    x = torch.randn(40, 4096, device="cuda", dtype=BF16)
    rows = parts.spread(x, routing)
    assert torch.equal(rows, PlainParts().spread(x, routing))
    assert error(parts.gather_sum(rows, routing, None), x.double().cpu() * 24) < LIMIT[BF16]


def test_more_elements_than_an_int32_counts(parts):
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of free device memory")
    tokens, top_k, width = 1 << 18, 4, 2304
    index = torch.randint(0, 4, (tokens, top_k), device="cuda")
    routing = parts.route(index, 4)
    x = torch.randn(tokens, width, device="cuda", dtype=BF16)
    rows = parts.spread(x, routing)
    assert rows.numel() > 2**31
    last = slice(-1000, None)
    assert torch.equal(rows[last], x[routing.pair[last].long() // top_k])
    sums = parts.gather_sum(rows, routing, None)
    assert torch.equal(sums[last], (x[last].float() * top_k).to(BF16))
    inner = parts.activate(rows, None)
    wanted = PlainParts().activate(rows[last].double(), None).cpu()
    assert error(inner[last], wanted) < LIMIT[BF16]
    weights = torch.rand(tokens, top_k, device="cuda")
    some, d_inner = rows[last].clone(), torch.randn_like(inner)
    given = d_inner[last].clone()
    found = parts.activate_back(rows, d_inner, None, Scale(weights, routing.pair), routing.ends, over=True)
    scale = Scale(weights.view(-1)[routing.pair[last].long()].view(-1, 1), torch.arange(1000, device="cuda"))
    wanted = PlainParts().activate_back(
        some.double(), given.double(), None, scale, torch.tensor([1000], device="cuda"), over=False
    )
    assert error(found.product[last], wanted.product.cpu()) < LIMIT[BF16]
    assert error(found.inner[last], wanted.inner.cpu()) < LIMIT[BF16]
    assert error(found.scale.view(-1)[routing.pair[last].long()], wanted.scale.view(-1).cpu()) < LIMIT[BF16]


def test_initial_values_are_those_of_the_cpu():
    for dtype, limit in ((torch.float64, 1e-13), (torch.float32, 1e-8), (BF16, 0.0)):
        there, here = (torch.empty(3, 257, 129, dtype=dtype, device=device) for device in ("cuda", "cpu"))
        for stack in (there, here):
            initial_experts(stack, [5, 0, 2], seed=11, stack=1)
        assert error(there, here.double()) <= limit


def test_initial_values_of_a_large_matrix_come_in_pieces():
    whole = torch.empty(2, 4096, 5000, dtype=BF16, device="cuda")
    initial_experts(whole, [0, 1], seed=1)
    part = torch.empty(1, 4096, 5000, dtype=BF16, device="cuda")
    initial_experts(part, [1], seed=1)
    assert torch.equal(part[0], whole[1])
    assert abs(float(whole.float().std()) * 5000**0.5 - 1) < 1e-3
