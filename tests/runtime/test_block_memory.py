"""What the expert block holds in its backward pass: rows gathered in parts, memory given back as early as can be."""

import weakref

import pytest

torch = pytest.importorskip("torch")
from block_oracle import by_loop, make  # noqa: E402
from test_block import DTYPES, LIMIT, assert_close, run  # noqa: E402

from moeyard.runtime.block import fused  # noqa: E402
from moeyard.runtime.block.plain import PlainParts  # noqa: E402


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("tokens", [20, 30], ids=["heavy", "heavier rows"])
def test_rows_gathered_in_parts(dtype, transposed, tokens, monkeypatch):
    """Fewer rows an expert than a row is wide: the gradient of `down` comes last, and rows are gathered some columns at a time."""
    case = make(tokens, 40, 8, 3, 4, index=torch.arange(4 * tokens).view(-1, 4) % 3, bias=True)
    whole = run(case, dtype, transposed=transposed)
    assert_close(whole, by_loop(case), LIMIT[dtype])
    spread, widths = PlainParts.spread, []

    def noted(parts, x, routing):
        widths.append(x.shape[1])
        return spread(parts, x, routing)

    monkeypatch.setattr(PlainParts, "spread", noted)
    monkeypatch.setattr("moeyard.runtime.block.fused.PART", 16)
    found = run(case, dtype, transposed=transposed)
    assert widths == ([40, 40, 16, 16, 8, 16, 16, 8] if tokens == 20 else [40, 40, 40])
    assert_close(found, by_loop(case), LIMIT[dtype])


def test_the_product_is_gone_when_the_last_gradient_is_made(monkeypatch):
    """With stacks that outweigh the rows: the gradient of `down` is made beside the inner rows alone."""
    case, products, alive = make(20, 40, 8, 3, 2), [], []
    times, gathered = fused.times, fused.gathered_outer

    def noted(*given):
        products.append(weakref.ref(found := times(*given)))
        return found

    def watched(*given, **options):
        alive.append(products[0]() is not None)
        return gathered(*given, **options)

    monkeypatch.setattr(fused, "times", noted)
    monkeypatch.setattr(fused, "gathered_outer", watched)
    run(case, torch.float64)
    assert alive == [True, False]
