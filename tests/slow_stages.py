"""Batches and stages the slow, obvious way: every share counted anew, names in sets."""

from __future__ import annotations

from itertools import pairwise

LEVELS = 32


def batch(share: float, ratio: float, finest: float) -> int:
    """The batch, counted from the edge, in which this share of the rows lies."""
    edge, width, at = finest, finest, 0
    while share >= edge:
        width /= ratio
        edge, at = edge + width, at + 1
    return at


def slow_levels_by_node(wire, balance_ratio, spread_ratio, finest):
    messages, early, late = wire.T.tolist(), [], []
    for s, k, f, _, _ in messages:
        sends = [m for m in messages if m[1] == k]
        gets = [m for m in messages if m[2] == f]
        sent = rows(m for m in sends if m[0] < s) / rows(sends)
        left = 1.0 - rows(m for m in gets if m[0] <= s) / rows(gets)
        early.append(batch(sent, balance_ratio[k], finest[k]))
        late.append(LEVELS - 1 - batch(left, spread_ratio[f], finest[f]))
    return early, late


def slow_levels_by_stage(wire, head, tail, finest):
    messages = wire.T.tolist()
    stages = sorted({m[0] for m in messages})
    size = {s: float(max(m[4] - m[3] for m in messages if m[0] == s)) for s in stages}
    whole = sum(size.values())
    sent = {s: sum(size[q] for q in stages if q < s) for s in stages}
    early = [batch(sent[m[0]] / whole, head, finest) for m in messages]
    left = {s: max(0.0, 1.0 - (sent[s] + size[s]) / whole) for s in stages}
    late = [LEVELS - 1 - batch(left[m[0]], tail, finest) for m in messages]
    return early, late


def rows(messages) -> int:
    return sum(m[4] - m[3] for m in messages)


def slow_waves(rows, least, cuts):
    """Wire messages of pairs in waves that end at `cuts`, in 64ths; pairs of fewer than `least` rows go whole, in the first."""
    found = []
    for w, (before, cut) in enumerate(pairwise([0, *cuts])):
        for k, of_node in enumerate(rows.tolist()):
            for f, count in enumerate(of_node):
                lo, hi = count * before // 64, count * cut // 64
                if count < least[k, f]:
                    lo, hi = 0, count if w == 0 else 0
                if lo < hi:
                    found.append((w, k, f, lo, hi))
    return found


def slow_assemble(wire, early, late, nodes, inside, per_node, barrier, waves=0):
    """What `assemble` says, or `waved_form` of so many `waves`, each of which has its stages, rows or not, as
    (order of stages, their names, messages by pair): a stage is ("balance", group, batch), ("local",),
    ("wire", w) or ("spread", group, batch)."""
    messages = [(*m, e, l) for m, e, l in zip(wire.T.tolist(), early, late, strict=True)]
    group = (lambda node: node) if per_node else (lambda node: 0)
    groups = range(nodes) if per_node else range(1)
    wires = range(waves) if waves else sorted({m[0] for m in messages})
    place = {("wire", w): (w, 1) for w in wires}  # (before, at or after which wire stage)
    if inside:
        place["local",] = (0, 0.5)
        for w in range(waves):
            place["balance", 0, w], place["spread", 0, w] = (w, 0), (w, 2)
        for w, k, f, _, _, e, l in messages:
            place.setdefault(("balance", group(k), e), (w, 0))
            place["spread", group(f), l] = (w, 2)
    order = sorted(place, key=lambda stage: (*place[stage], *stage[1:], stage[0]))
    number = {stage: i for i, stage in enumerate(order)}
    names = {stage: set() for stage in order}
    for g in groups:
        for kind in ("balance", "spread"):
            chain = [s for s in order if s[:2] == (kind, g)]
            for before, stage in pairwise(chain):
                names[stage].add(number[before])
            if inside and chain:
                first = number["local",]
                if kind == "spread":
                    names[chain[0]].add(first)
        if inside:
            before = [number[s] for s in order if s[:2] == ("balance", g) and number[s] < number["local",]]
            names["local",] |= set(before[-1:])
    sent, got = {}, {}
    for w in wires:
        now = [m for m in messages if m[0] == w]
        for _, k, f, _, _, e, l in now:
            names["wire", w] |= {q for q in (sent.get(k), (sent if barrier else got).get(f)) if q is not None}
            if inside:
                names["wire", w].add(number["balance", group(k), e])
                names["spread", group(f), l].add(number["wire", w])
        for _, k, f, *_ in now:
            sent[k] = number["wire", w]
            (sent if barrier else got)[f] = number["wire", w]
    by_pair = [
        (
            number["wire", w], lo, hi,
            number["balance", group(k), e] if inside else -1, number["spread", group(f), l] if inside else -1,
        )
        for w, k, f, lo, hi, e, l in sorted(messages, key=lambda m: m[1] * nodes + m[2])
    ]  # fmt: skip
    return order, [sorted(names[stage]) for stage in order], by_pair
