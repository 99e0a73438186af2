"""How many rows cross when a token goes to a node once, guessed from counts alone: as if choices knew nothing of one another.

Called by `moeyard.crossing`. R ranks, G ranks of a node. A token has `top` different choices. The chance that it misses a set of experts is
that of so many draws without putting back, each by the experts' shares of what is left; which is exact where all are alike. It is no more
than the product of missing each of them (who takes one has fewer left for the others), and no less than what the union of them leaves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel


class Chosen(NamedTuple):
    """By source and host: the chance that all experts there are missed, one by one; rows; squares of their shares."""

    apart_RR: np.ndarray
    rows_RR: np.ndarray
    squares_RR: np.ndarray


@inner
def _missed(apart, rows, squares, tokens, top):
    """Chance that a token goes nowhere in a set. apart: the product over its experts; rows: of all tokens to it; squares: of the shares of all
    experts outside of it."""
    share = rows / (tokens * top)
    outside, drawn = 1.0 - share, 1.0
    gone = squares / max(outside, 1e-9)  # of the shares, with each draw outside
    for i in range(top):
        left = 1.0 - i * gone
        drawn *= max(0.0, outside - i * gone) / left if left > 1e-9 else 0.0
    return max(1.0 - rows / tokens, min(apart, drawn))


@inner
def _land(visits_G, landed_G, tokens, crossed):
    """landed_G: rows that land on each rank of a node, as many as cross: alike, but at least those of tokens that want nobody else there, and
    none but those of tokens that want it."""
    per, missed = len(visits_G), 1.0
    for g in range(per):
        missed *= 1.0 - visits_G[g] / tokens
    level = crossed / per
    for turn in range(4):
        total, free = 0.0, 0
        for g in range(per):
            own = 1.0 - visits_G[g] / tokens
            alone = visits_G[g] * missed / own if own > 1e-9 else 0.0
            landed_G[g] = max(alone, min(visits_G[g], level))
            total += landed_G[g]
            free += alone < level < visits_G[g]
        if turn < 3:
            level += (crossed - total) / max(1, free)
    for g in range(per):
        landed_G[g] = min(visits_G[g], landed_G[g] * crossed / max(total, 1e-9))


@inner
def _cross(chosen, top, once_RR, more_R, landed_R, visits_G, landed_G):
    """Fill once_RR: rows to each rank; add up by rank what lands from other nodes, and the copies that it wants besides."""
    ranks, per = len(once_RR), len(visits_G)
    for r in range(ranks):
        rows, squares = 0.0, 0.0
        for h in range(ranks):
            rows += chosen.rows_RR[r, h]
            squares += chosen.squares_RR[r, h]
        tokens = rows / top
        if tokens <= 0.0:
            continue
        for first in range(0, ranks, per):
            apart, sum_rows, inside, most, visits = 1.0, 0.0, 0.0, 0.0, 0.0
            for g in range(per):
                h = first + g
                own, square = chosen.rows_RR[r, h], chosen.squares_RR[r, h]
                missed = _missed(chosen.apart_RR[r, h], own, squares - square, tokens, top)
                visits_G[g] = tokens * (1.0 - missed)
                apart *= chosen.apart_RR[r, h]
                sum_rows += own
                inside += square
                most = max(most, visits_G[g])
                visits += visits_G[g]
            if r // per == first // per:
                for g in range(per):
                    once_RR[r, first + g] = int(visits_G[g] + 0.5)
                continue
            crossed = tokens * (1.0 - _missed(apart, sum_rows, squares - inside, tokens, top))
            _land(visits_G, landed_G, tokens, min(max(crossed, most), visits))
            for g in range(per):
                once_RR[r, first + g] = int(landed_G[g] + 0.5)
                landed_R[first + g] += landed_G[g]
                more_R[first + g] += visits_G[g] - landed_G[g]


@kernel
def likely(src, host, rows, top, per, ranks):
    """(once_RR, fan_RR): rows that are sent, and copies of them that are handed on inside nodes, of runs of rows from src to host, each of one
    expert."""
    chosen = Chosen(np.ones((ranks, ranks)), np.zeros((ranks, ranks)), np.zeros((ranks, ranks)))
    rows_R = np.zeros(ranks)
    for i in range(len(src)):
        rows_R[src[i]] += rows[i]
    for i in range(len(src)):
        r, h = src[i], host[i]
        if rows[i] > 0:
            share = rows[i] / rows_R[r]
            chosen.apart_RR[r, h] *= max(0.0, 1.0 - share * top)
            chosen.rows_RR[r, h] += rows[i]
            chosen.squares_RR[r, h] += share * share
    once_RR, fan_RR = np.zeros((ranks, ranks), np.int64), np.zeros((ranks, ranks), np.int64)
    more_R, landed_R = np.zeros(ranks), np.zeros(ranks)
    _cross(chosen, top, once_RR, more_R, landed_R, np.zeros(per), np.zeros(per))
    for first in range(0, ranks, per):
        landed = 0.0
        for at in range(first, first + per):
            landed += landed_R[at]
        for at in range(first, first + per):
            came = 0
            for r in range(ranks):
                if r // per != at // per:
                    came += once_RR[r, at]
            for to in range(first, first + per):
                if to != at and landed > landed_R[to]:
                    copies = more_R[to] * landed_R[at] / (landed - landed_R[to])
                    fan_RR[at, to] = min(came, int(copies + 0.5))
    return once_RR, fan_RR
