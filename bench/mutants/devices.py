"""Defects of what runs on a device: launches of an exchange, and the expert block."""

from __future__ import annotations

from bench.mutants.mutant import Mutant

_LAUNCHES = "tests/runtime/test_launches.py"
_BLOCK = "tests/runtime/test_block_memory.py"

DEVICES = [
    Mutant(
        "scratch is used again before it has been read",
        "runtime/transport/launches.py",
        "for one in taken if one.readers & ~done",
        "for one in taken if one.readers & ~done & 1",
        f"{_LAUNCHES}::test_every_row_comes_to_its_place",
    ),
    Mutant(
        "rows that stay on a rank are left behind",
        "runtime/transport/launches.py",
        "kept = program.keep_rows",
        "kept = 0",
        f"{_LAUNCHES}::test_every_row_comes_to_its_place",
    ),
    Mutant(
        "rows are brought to their places before they have come",
        "runtime/transport/launches.py",
        "if packs[later] and before[later] >> s & 1",
        "if packs[later]",
        f"{_LAUNCHES}::test_every_row_comes_to_its_place",
    ),
    Mutant(
        "a stage takes the place of rows that it does not wait for",
        "runtime/transport/launches.py",
        "waits_S[s] += tuple(t for t in range(s) if late >> t & 1)",
        "pass",
        f"{_LAUNCHES}::test_a_stage_waits_only_for_earlier_ones",
    ),
    Mutant(
        "memory beside an exchange has no bound",
        "runtime/transport/launches.py",
        "if at + size > limit and (early",
        "if False and (early",
        f"{_LAUNCHES}::test_launches_and_memory_are_few",
    ),
    Mutant(
        "the sender alone cuts a message",
        "runtime/transport/transfers.py",
        "cut_M = (count_M > 1) &",
        "cut_M = program.send & (count_M > 1) &",
        f"{_LAUNCHES}::test_every_row_comes_to_its_place",
    ),
    Mutant(
        "a transfer has the runs of the next one",
        "runtime/transport/transfers.py",
        "np.searchsorted(run_first, first)",
        'np.searchsorted(run_first, first, "right")',
        f"{_LAUNCHES}::test_every_row_comes_to_its_place",
    ),
    Mutant(
        "the product is held to the end",
        "runtime/block/fused.py",
        "ctx.maybe_clear_saved_tensors()  # the product's memory",
        "pass  # the product's memory",
        f"{_BLOCK}::test_the_product_is_gone_when_the_last_gradient_is_made",
    ),
    Mutant(
        "the gradient of down is left out where it comes last",
        "runtime/block/fused.py",
        "if inner is not None:",
        "if False:",
        f"{_BLOCK}::test_either_order_of_the_gradients",
    ),
]
