"""The same exchanges by the plan and by torch's own all-to-all, compared bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moeyard.arrays import IntArray
from moeyard.runtime.agree.control import Control
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.faults.errors import Mismatch
from moeyard.runtime.transport.api import Transport
from moeyard.traffic import Traffic

WIDEST = 256  # bytes of a row here: which rows go where does not depend on their width
WAYS = ("there", "back")


def some_traffic(ranks: int) -> Traffic:
    """Uneven, with blocks of no rows: for a yard that has planned nothing yet."""
    src, dst = np.indices((ranks, ranks))
    return Traffic((src * 7 + dst * 5 + 3) % 11 * (src * 3 + dst) % 4, 64)


def compare_both_ways(
    plans: Sequence[Plan], planned: Transport, plain: Transport, control: Control, device: torch.device
) -> int:
    """How many exchanges came out alike; Mismatch on every rank if one did not. Every rank calls this with the same plans."""
    rank, first = control.ranks.index(torch.distributed.get_rank()), np.full(4, -1, np.int64)
    for number, plan in enumerate(plans):
        for way, name in enumerate(WAYS):
            at = _difference(
                plan, name == "back", planned, plain, rank, device
            )  # always: the others do it too
            if at is not None and first[0] < 0:
                first = np.array([number, way, *at], np.int64)
    _raise_alike(plans, control.gather(first), control)
    return 2 * len(plans)


def _difference(
    plan: Plan, backward: bool, planned: Transport, plain: Transport, rank: int, device: torch.device
) -> tuple[int, int] | None:
    """(row, where it comes from) of the first row that differs here."""
    sent, received = plan.input_splits, plan.output_splits
    if backward:
        sent, received = received, sent
    width = min(plan.traffic.row_bytes, WIDEST)
    generator = torch.Generator().manual_seed(1 + rank)
    source = torch.randint(256, (sum(sent), width), dtype=torch.uint8, generator=generator).to(device)
    outputs = []
    for transport in (planned, plain):
        output = torch.zeros((sum(received), width), dtype=torch.uint8, device=device)
        transport.exchange(plan, backward, output, source, False)
        outputs.append(output.cpu())
    wrong = (outputs[0] != outputs[1]).any(dim=1).nonzero()
    if not len(wrong):
        return None
    row = int(wrong[0])
    return row, int(np.searchsorted(np.cumsum(received), row, side="right"))


def _raise_alike(plans: Sequence[Plan], found: IntArray, control: Control) -> None:
    for rank, (number, way, row, origin) in enumerate(found.tolist()):
        if number < 0:
            continue
        plan = plans[number]
        raise Mismatch(
            f"self_check: exchange {number} of {len(plans)} ({plan.schedule.scheduler}, {plan.schedule.num_stages} stages, digest "
            f"{plan.digest:#x}), the way {WAYS[way]}: rank {rank} got another row {row} from rank {origin} than by torch's own "
            f"all-to-all; set MOEYARD=off to train without plans, and report this schedule",
            (control.ranks[origin], control.ranks[rank]),
        )
