"""What goes wrong between ranks, and who did it.

ExchangeError
+-- Mismatch    ranks disagree on splits, plan, order of calls or world; found before anything is sent
+-- RankLost    a rank died, or did not answer within the time-out
+-- RailLost    messages stopped although all ranks live, and rails are bound: `Yard.recover` finds out which died
"""

from __future__ import annotations

from moeyard.errors import MoeyardError


class ExchangeError(MoeyardError):
    """An exchange that cannot be done. Every rank gets one, and it names the rank or pair at fault."""


class Mismatch(ExchangeError):
    """Ranks disagree."""


class RankLost(ExchangeError):
    """A rank died or did not answer."""


class RailLost(ExchangeError):
    """Messages stopped, but every rank answers: a rail may be dead. Every rank calls `yard.recover(error)`."""
