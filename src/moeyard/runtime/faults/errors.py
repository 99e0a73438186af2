"""What goes wrong between ranks, and who did it.

ExchangeError   .ranks: who is to blame
+-- Mismatch    ranks disagree on splits, plan, order of calls or world; found before anything is sent
+-- RankLost    a rank died, or did not answer within the time-out
+-- RailLost    messages stopped although all ranks live, and rails are bound: `Yard.recover` finds out which died
"""

from __future__ import annotations

from collections.abc import Iterable

from moeyard.errors import MoeyardError


class ExchangeError(MoeyardError):
    """Something between ranks that cannot be done. Every rank gets one, and it names the rank or pair at fault.

    ranks: those at fault, in the world's numbers (`torch.distributed.get_rank()`): who is to blame may be in another
    expert-parallel group. Both of a pair where it cannot be told which of the two is wrong; none where no rank is.
    """

    def __init__(self, text: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(sorted({int(rank) for rank in ranks}))


class Mismatch(ExchangeError):
    """Ranks disagree."""


class RankLost(ExchangeError):
    """A rank died or did not answer."""


class RailLost(ExchangeError):
    """Messages stopped, but every rank answers: a rail may be dead. Every rank calls `yard.recover(error)`."""
