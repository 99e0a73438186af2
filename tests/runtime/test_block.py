"""The expert block against a float64 loop: values and every gradient, in any layout, with empty experts and odd choices."""

import math

import pytest

torch = pytest.importorskip("torch")
from block_oracle import by_loop, error, make  # noqa: E402
from torch.nn import functional  # noqa: E402

from moeyard.errors import InvalidModel, UnknownName  # noqa: E402
from moeyard.runtime.block import expert_block, grouped_experts, initial_experts  # noqa: E402
from moeyard.runtime.block.plain import PlainParts  # noqa: E402

# Relative norms. bf16 keeps 8 bits, and a value is rounded four times on its way at most: a hundredth is a wrong formula.
LIMIT = {torch.float64: 1e-12, torch.float32: 5e-7, torch.bfloat16: 8e-3}
DTYPES = list(LIMIT)


def run(case, dtype, device="cpu", **options):
    """(y, gradients by name) of the block, stacks transposed for it if it wants them so."""
    given, index, d_y = case.leaves(dtype, device)
    stacks = [given["gate_up"], given["down"]]
    if options.get("transposed"):
        stacks = [stack.transpose(1, 2).contiguous() for stack in stacks]
    biases = {name: given.get(name) for name in ("gate_up_bias", "down_bias")}
    y = expert_block(given["x"], index, given["weights"], *stacks, **biases, **options)
    y.backward(d_y)
    return y, {name: leaf.grad for name, leaf in given.items()}


def assert_close(found, wanted, limit):
    (y, grads), (true_y, true_grads) = found, wanted
    errors = {"y": error(y, true_y)} | {name: error(grads[name], true_grads[name]) for name in true_grads}
    assert all(value <= limit for value in errors.values()), errors
    return errors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
def test_values_and_all_gradients(dtype, bias, transposed):
    case = make(40, 32, 24, 5, 3, bias=bias)
    assert_close(run(case, dtype, transposed=transposed), by_loop(case), LIMIT[dtype])


def test_sizes_that_grouped_mm_does_not_take():
    case = make(20, 15, 9, 4, 2, bias=True)
    assert_close(run(case, torch.float32), by_loop(case), LIMIT[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_experts_have_zero_gradients(dtype):
    case = make(12, 16, 8, 6, 2, index=torch.tensor([[1, 4]] * 12))
    found = run(case, dtype)
    assert_close(found, by_loop(case), LIMIT[dtype])
    for e in (0, 2, 3, 5):
        assert not found[1]["gate_up"][e].any()
        assert not found[1]["down"][e].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_expert_chosen_twice_counts_twice(dtype):
    index = torch.randint(0, 3, (30, 4), generator=torch.Generator().manual_seed(1))
    case = make(30, 16, 8, 3, 4, index=index, bias=True)
    assert_close(run(case, dtype), by_loop(case), LIMIT[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_an_index_outside_adds_nothing(dtype, bias):
    index = torch.randint(-1, 5, (30, 3), generator=torch.Generator().manual_seed(2))
    case = make(30, 16, 8, 4, 3, index=index, bias=bias)
    found = run(case, dtype)
    assert_close(found, by_loop(case), LIMIT[dtype])
    outside = (index < 0) | (index > 3)
    assert outside.any()
    assert not found[1]["weights"][outside].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tokens(dtype):
    case = make(0, 16, 8, 4, 2, bias=True)
    y, grads = run(case, dtype)
    assert y.shape == (0, 16)
    assert all(not grad.any() for grad in grads.values())


JOINS = {
    "gelu": (lambda p: functional.gelu(p.chunk(2, -1)[0]) * p.chunk(2, -1)[1], {"activation": "gelu"}, 2),
    "function": (
        lambda p: torch.tanh(p.chunk(2, -1)[0]) * p.chunk(2, -1)[1],
        {"activation": torch.tanh},
        2,
    ),
    "interleaved": (lambda p: functional.silu(p[..., ::2]) * (p[..., 1::2] + 1), None, 2),
    "no gate": (lambda p: functional.relu(p).square(), None, 1),
}


@pytest.mark.parametrize("name", JOINS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_any_activation(name, dtype):
    join, options, width = JOINS[name]
    case = make(24, 16, 8, 4, 2, join_width=width, bias=True)
    found = run(case, dtype, **(options or {"join": join}))
    assert_close(found, by_loop(case, join), LIMIT[dtype])


class Wrong(PlainParts):
    """SwiGLU with a mistake."""

    def __init__(self, wrong):
        self.wrong = wrong

    def activate(self, product, activation):
        return super().activate(product, activation or self.wrong)

    def activate_back(self, product, d_inner, activation, scale, ends, *, over):
        return super().activate_back(product, d_inner, activation or self.wrong, scale, ends, over=over)


MISTAKES = {
    "gelu for silu": lambda p: functional.gelu(p.chunk(2, -1)[0]) * p.chunk(2, -1)[1],
    "gate and up swapped": lambda p: functional.silu(p.chunk(2, -1)[1]) * p.chunk(2, -1)[0],
    "2% in the sigmoid": lambda p: (
        p.chunk(2, -1)[0] * torch.sigmoid(1.02 * p.chunk(2, -1)[0]) * p.chunk(2, -1)[1] * 1.01
    ),
    "gradient through the gate's factor only": lambda p: (
        p.chunk(2, -1)[0] * torch.sigmoid(p.chunk(2, -1)[0]).detach() * p.chunk(2, -1)[1]
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_swiglu_is_outside_the_tolerance_of_bf16(mistake, monkeypatch):
    case = make(64, 32, 24, 4, 2)
    wanted = by_loop(case)
    assert_close(run(case, torch.bfloat16), wanted, LIMIT[torch.bfloat16])
    monkeypatch.setattr("moeyard.runtime.block.experts._PLAIN", Wrong(MISTAKES[mistake]))
    with pytest.raises(AssertionError, match="gate_up"):
        assert_close(run(case, torch.bfloat16), wanted, LIMIT[torch.bfloat16])


def grouped(case, dtype, ends, device="cpu", **options):
    given, _, d_y = case.leaves(dtype, device)
    ends = torch.tensor(ends, dtype=torch.int32, device=device)
    biases = {name: given.get(name) for name in ("gate_up_bias", "down_bias")}
    out = grouped_experts(given["x"], ends, given["gate_up"], given["down"], **biases, **options)
    out.backward(d_y)
    return out, {name: leaf.grad for name, leaf in given.items() if name != "weights"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_rows_grouped_by_expert(dtype, bias):
    ends = [4, 4, 11, 26]  # expert 1 is empty, four rows are nobody's
    index = torch.full((30, 1), -1)
    for e, (at, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        index[at:end] = e
    case = make(30, 16, 8, 4, 1, index=index, bias=bias)
    case.weights = torch.ones_like(case.weights)
    true_y, true_grads = by_loop(case)
    del true_grads["weights"]
    for counts in (None, [4, 0, 7, 15]):
        found = grouped(case, dtype, ends, counts=counts)
        assert_close(found, (true_y, true_grads), LIMIT[dtype])
        assert not found[0][26:].any()
        assert not found[1]["x"][26:].any()


def test_a_plain_sum_without_weights():
    case = make(20, 16, 8, 4, 2)
    case.weights = torch.ones_like(case.weights)
    wanted = by_loop(case)
    given, index, d_y = case.leaves(torch.float64)
    y = expert_block(given["x"], index, None, given["gate_up"], given["down"])
    y.backward(d_y)
    grads = {name: leaf.grad for name, leaf in given.items() if name != "weights"}
    del wanted[1]["weights"]
    assert_close((y, grads), wanted, 1e-12)


def test_only_what_is_asked_for_is_computed():
    case = make(20, 16, 8, 4, 2)
    given, index, d_y = case.leaves(torch.float64)
    frozen = {name: leaf.detach() for name, leaf in given.items()}
    y = expert_block(given["x"], index, given["weights"], frozen["gate_up"], frozen["down"])
    y.backward(d_y)
    wanted = by_loop(case)[1]
    assert error(given["x"].grad, wanted["x"]) < 1e-12
    assert error(given["weights"].grad, wanted["weights"]) < 1e-12
    assert frozen["gate_up"].grad is None


def test_stacks_read_again_in_the_backward_pass():
    """In a shared workspace they are overwritten in between, and refilled."""
    case = make(20, 16, 8, 4, 2)
    given, index, d_y = case.leaves(torch.float64)
    kept = [given["gate_up"].detach().clone(), given["down"].detach().clone()]
    y = expert_block(
        given["x"], index, given["weights"], given["gate_up"], given["down"], again=lambda: (kept[0], kept[1])
    )
    with torch.no_grad():
        given["gate_up"].fill_(math.nan)
        given["down"].fill_(math.nan)
    y.backward(d_y)
    wanted = by_loop(case)[1]
    assert all(error(given[name].grad, wanted[name]) < 1e-12 for name in wanted)


def test_a_graph_that_is_kept_can_be_run_again():
    case = make(20, 16, 8, 4, 2)
    given, index, d_y = case.leaves(torch.float64)
    y = expert_block(given["x"], index, given["weights"], given["gate_up"], given["down"])
    leaves = list(given.values())
    first = torch.autograd.grad(y, leaves, d_y, retain_graph=True)
    second = torch.autograd.grad(y, leaves, d_y)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_product_is_overwritten_only_where_nobody_asks_again():
    """What is saved: tokens, weights, product, routing, stacks. Nothing else of the size of the rows."""
    case = make(64, 16, 8, 4, 2)
    given, index, d_y = case.leaves(torch.float64)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = expert_block(given["x"], index, given["weights"], given["gate_up"], given["down"])
    product = [t for t in saved if t.shape == (128, 16)]
    assert len(product) == 1
    assert not [t for t in saved if t.shape[0] == 128 and t.dim() == 2 and t is not product[0]]
    before = product[0].clone()
    y.backward(d_y, retain_graph=True)
    assert torch.equal(product[0], before)
    version = product[0]._version
    y.backward(d_y)
    assert not torch.equal(product[0], before)
    assert product[0]._version > version


def test_checkpointed_and_under_autocast():
    from torch.utils.checkpoint import checkpoint

    case = make(20, 16, 8, 4, 2)
    given, index, d_y = case.leaves(torch.bfloat16)

    def block(x, weights):
        return expert_block(x, index, weights, given["gate_up"], given["down"], activation=torch.tanh)

    plain = block(given["x"], given["weights"])
    leaves = list(given.values())
    wanted = torch.autograd.grad(plain, leaves, d_y)
    with torch.autocast("cpu", dtype=torch.float16):
        y = checkpoint(block, given["x"], given["weights"], use_reentrant=False)
    found = torch.autograd.grad(y, leaves, d_y)
    assert torch.equal(y, plain)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_second_derivative_is_refused():
    case = make(4, 16, 8, 4, 2)
    given, index, _ = case.leaves(torch.float64)
    y = expert_block(given["x"], index, given["weights"], given["gate_up"], given["down"])
    with pytest.raises(InvalidModel, match="no second derivative"):
        torch.autograd.grad(y.sum(), given["x"], create_graph=True)


def test_what_does_not_fit_is_refused_by_name():
    case = make(4, 16, 8, 4, 2)
    given, index, _ = case.leaves(torch.float32)
    x, weights, gate_up, down = (given[name] for name in ("x", "weights", "gate_up", "down"))
    with pytest.raises(InvalidModel, match=r"\[E, in, out\]"):
        expert_block(x, index, weights, gate_up, down, transposed=True)
    with pytest.raises(InvalidModel, match="cast one of them"):
        expert_block(x.bfloat16(), index, weights, gate_up, down)
    with pytest.raises(InvalidModel, match="one weight a choice"):
        expert_block(x, index, weights[:, :1], gate_up, down)
    with pytest.raises(InvalidModel, match="or give `join`"):
        expert_block(x, index, weights, gate_up[:, :8], down)
    with pytest.raises(InvalidModel, match=r"bias is float32 \[4, 8\]; give \[4, 16\]"):
        expert_block(x, index, weights, gate_up, down, gate_up_bias=torch.zeros(4, 8))
    with pytest.raises(InvalidModel, match="int32"):
        grouped_experts(x, torch.tensor([1, 2, 3, 4]), gate_up, down)
    with pytest.raises(UnknownName, match="did you mean 'silu'"):
        expert_block(x, index, weights, gate_up, down, activation="sillu")
    with pytest.raises(InvalidModel, match="triton does not compute"):
        expert_block(x, index, weights, gate_up, down, kernels="triton")
    slope = torch.ones((), requires_grad=True)
    with pytest.raises(InvalidModel, match="requires gradients"):
        expert_block(x, index, weights, gate_up, down, activation=lambda gate: gate * slope)


def test_the_block_stands_on_errors_alone(root):
    for path in (root / "src/moeyard/runtime/block").glob("*.py"):
        for line in path.read_text().splitlines():
            if "import" in line.split("#")[0] and "moeyard." in line:
                assert line.split()[1].startswith(("moeyard.runtime.block", "moeyard.errors")), (
                    path.name,
                    line,
                )


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo itself looks at it after a graph break
def test_inside_torch_compile():
    case = make(20, 16, 8, 4, 2)

    def layer(x, index, weights, gate_up, down):
        return expert_block(x * 2, index, weights, gate_up, down) + 1

    found = []
    for call in (layer, torch.compile(layer, backend="aot_eager")):
        given, index, d_y = case.leaves(torch.float64)
        y = call(given["x"], index, given["weights"], given["gate_up"], given["down"])
        y.backward(d_y)
        found.append([y, *(leaf.grad for leaf in given.values())])
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*found, strict=True))


# --- initial values


def split_mix(seed, expert, stack, count):
    """Normal values one by one, in Python's integers."""
    mask = (1 << 64) - 1

    def mixed(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    state = 0
    for part in (seed, expert, stack):
        state = mixed((state + part + 0x9E3779B97F4A7C15) & mask)
    values = []
    while len(values) < count:
        state = (state + 0x9E3779B97F4A7C15) & mask
        bits = mixed(state)
        radius = math.sqrt(-2 * math.log(((bits & 0xFFFFFFFF) + 1) / 2**32))
        angle = 2 * math.pi * (bits >> 32) / 2**32
        values += [radius * math.cos(angle), radius * math.sin(angle)]
    return torch.tensor(values[:count], dtype=torch.float64)


@pytest.mark.parametrize("seed", [0, 7, -1, 2**70 + 3])
def test_initial_values_are_the_sequence(seed):
    stack = torch.empty(3, 7, 5, dtype=torch.float64)
    initial_experts(stack, [4, 0, 9], seed=seed, stack=1)
    for place, expert in enumerate([4, 0, 9]):
        wanted = split_mix(seed, expert, 1, 35).view(7, 5) * 5**-0.5
        assert torch.allclose(stack[place], wanted, rtol=1e-13, atol=0)


def test_initial_values_do_not_depend_on_the_ranks(monkeypatch):
    whole = torch.empty(8, 33, 21, dtype=torch.bfloat16)
    initial_experts(whole, range(8), seed=3)
    monkeypatch.setattr("moeyard.runtime.block.initial._DRAWS", {"cpu": 100, "cuda": 100})
    for ranks in (1, 2, 4, 8):
        for rank in range(ranks):
            own = list(range(rank, 8, ranks))
            part = torch.empty(len(own), 33, 21, dtype=torch.bfloat16)
            initial_experts(part, own, seed=3)
            assert torch.equal(part, whole[own])


def test_initial_values_in_any_layout():
    plain = torch.empty(2, 6, 4)
    initial_experts(plain, [0, 1], seed=1)
    turned = torch.empty(2, 4, 6).transpose(1, 2)
    initial_experts(turned, [0, 1], seed=1)
    assert torch.equal(turned, plain)
    initial_experts(torch.empty(0, 6, 4), [], seed=1)


def test_initial_values_are_normal_and_independent():
    stack = torch.empty(4, 200, 250, dtype=torch.float64)
    initial_experts(stack, range(4), seed=5, scale=1.0)
    flat = stack.view(4, -1)
    n = flat.shape[1]
    assert flat.mean(1).abs().max() < 5 / math.sqrt(n)
    assert (flat.var(1) - 1).abs().max() < 5 * math.sqrt(2 / n)
    assert (flat.pow(4).mean(1) - 3).abs().max() < 5 * math.sqrt(96 / n)
    across = torch.corrcoef(flat) - torch.eye(4)
    assert across.abs().max() < 5 / math.sqrt(n)
    along = torch.corrcoef(torch.stack([flat[0, :-1], flat[0, 1:]]))[0, 1]
    assert along.abs() < 5 / math.sqrt(n)
    other = torch.empty_like(stack)
    initial_experts(other, range(4), seed=6, scale=1.0)
    assert not torch.isclose(stack, other).all(-1).any()
