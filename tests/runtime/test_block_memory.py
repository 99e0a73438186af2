"""What the expert block holds in its backward pass: memory is given back as early as can be."""

import weakref

import pytest

torch = pytest.importorskip("torch")
from block_oracle import by_loop, make  # noqa: E402
from test_block import DTYPES, LIMIT, assert_close, run  # noqa: E402

from moeyard.runtime.block import fused  # noqa: E402


@pytest.fixture(autouse=True)
def worth(monkeypatch):
    monkeypatch.setattr(fused, "WORTH", 0)


# tokens with two choices each of three experts, rows of 40: fewer rows an expert than a row is wide, or more
SIZES = {20: "heavy stacks", 90: "heavy rows"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("tokens", SIZES, ids=SIZES.values())
def test_either_order_of_the_gradients(dtype, transposed, tokens, monkeypatch):
    case, order = make(tokens, 40, 8, 3, 2, bias=True), []
    down, gate_up = fused.down_gradient, fused.backward_gate_up
    monkeypatch.setattr(fused, "down_gradient", lambda *given: order.append("down") or down(*given))
    monkeypatch.setattr(fused, "backward_gate_up", lambda *given: order.append("gate_up") or gate_up(*given))
    found = run(case, dtype, transposed=transposed)
    assert order == (["gate_up", "down"] if tokens == 20 else ["down", "gate_up"])
    assert_close(found, by_loop(case), LIMIT[dtype])


def test_the_product_is_gone_when_the_last_gradient_is_made(monkeypatch):
    """With stacks that outweigh the rows: the gradient of `down` is made beside the inner rows alone."""
    products, alive, times = [], [], fused.times

    def noted(*given):
        products.append(weakref.ref(found := times(*given)))
        return found

    def watched(name):
        made = getattr(fused, name)
        return lambda *given: alive.append((name, products[0]() is not None)) or made(*given)

    monkeypatch.setattr(fused, "times", noted)
    for name in ("down_gradient", "backward_gate_up"):
        monkeypatch.setattr(fused, name, watched(name))
    run(make(20, 40, 8, 3, 2), torch.float64)
    assert alive == [("backward_gate_up", True), ("down_gradient", False)]
