"""Loads of domain partitions, each in one pass over the demand.

Called by `planners.domains`. R ranks, E experts, N nodes, B domains; S0, S1, S2 are the sizes of a domain.
`shape`: datacenters, nodes of each, ranks of each. `sizes`: how many of each make one domain.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.common.csr import grouped
from moeyard.kernels.compile import inner, kernel


@inner
def domain_of(rank, sizes, shape):
    """Domains are numbered like ranks: by datacenter, then node, then local rank."""
    _, N, G = shape
    S0, S1, S2 = sizes
    return (rank // (N * G) // S0 * (N // S1) + rank // G % N // S1) * (G // S2) + rank % G // S2


@kernel
def domain_table(sizes, shape):
    """[rank] its domain."""
    domain = np.empty(shape[0] * shape[1] * shape[2], np.int64)
    for r in range(len(domain)):
        domain[r] = domain_of(r, sizes, shape)
    return domain


@inner
def member(index, sizes, shape):
    """Rank of a domain's index-th member, less the rank of its first."""
    _, N, G = shape
    _, S1, S2 = sizes
    return (index // (S1 * S2) * N + index // S2 % S1) * G + index % S2


@inner
def first_member(domain, sizes, shape):
    _, N, G = shape
    S0, S1, S2 = sizes
    per_node, per_datacenter = G // S2, N // S1 * (G // S2)
    node = domain // per_datacenter * S0 * N + domain % per_datacenter // per_node * S1
    return node * G + domain % per_node * S2


@kernel
def by_domain(home_E, sizes, shape, domains):
    """(ptr, expert): the experts of each domain, ascending."""
    domain = np.empty(len(home_E), np.int64)
    for e in range(len(home_E)):
        domain[e] = domain_of(home_E[e], sizes, shape)
    return grouped(domain, np.int64(0), len(domain), domains)


@inner
def send(x, rows_B, sizes, shape, rank_loads, wan_out, far):
    """Add rank x's rows for each domain's experts: up_out, up_in, off_out, off_in, computed; `far`: to other datacenters."""
    up_out, up_in, off_out, off_in, computed = rank_loads
    _, N, G = shape
    S0, S1, S2 = sizes
    members = S0 * S1 * S2
    domains = len(computed) // members
    locals_ = G // S2  # domains along a node
    d, n, g = x // (N * G), x // G % N, x % G
    low = d // S0 * (N // S1) * locals_
    high = low + N // S1 * locals_
    sent = 0.0
    into = far[x % members * domains : (x % members + 1) * domains]
    for b in range(low):
        into[b] += rows_B[b]
        sent += rows_B[b]
    for b in range(high, domains):
        into[b] += rows_B[b]
        sent += rows_B[b]
    wan_out[d] += sent
    off_out[x] += sent
    q = x % (S1 * S2)
    for b in range(low, high):
        bn, bg = (b - low) // locals_, (b - low) % locals_
        if bn != n // S1:
            t = (d * N + bn * S1 + q // S2) * G + bg * S2 + q % S2
            off_out[x] += rows_B[b]
            off_in[t] += rows_B[b]
        else:
            t = (d * N + n) * G + bg * S2 + g % S2
            if t != x:
                up_out[x] += rows_B[b]
                up_in[t] += rows_B[b]
        computed[t] += rows_B[b]


@kernel(nogil=True)
def domain_loads(rows_RE, home_E, S0, S1, widths, shape):
    """([width, (up_out, up_in, off_out, off_in, computed), rank], [width, (out, in), datacenter]) in rows.

    For domains of S0 datacenters x S1 nodes x each of `widths` ranks. A domain's members host all its experts, and rows go
    to the nearest host, equally near ones by src modulo their number: what placing with `domains` and assigning with
    `local_first` gives.
    """
    D, N, G = shape
    ranks = len(rows_RE)
    finest = ranks // (S0 * S1)
    ptr, expert = by_domain(home_E, (S0, S1, np.int64(1)), shape, finest)
    loads = np.zeros((len(widths), 5, ranks))
    wans = np.zeros((len(widths), 2, D))
    far = np.zeros((len(widths), ranks))  # rows to each member of each domain from other datacenters' domains
    rows_B, folded = np.zeros(finest), np.zeros(finest)
    for x in range(ranks):
        for b in range(finest):
            rows_B[b] = 0.0
            for i in range(ptr[b], ptr[b + 1]):
                rows_B[b] += rows_RE[x, expert[i]]
        for w in range(len(widths)):
            S2 = widths[w]
            for b in range(finest // S2):
                folded[b] = 0.0
                for i in range(b * S2, (b + 1) * S2):
                    folded[b] += rows_B[i]
            part = loads[w]
            rank_loads = (part[0], part[1], part[2], part[3], part[4])
            send(x, folded, (S0, S1, S2), shape, rank_loads, wans[w, 0], far[w])
    for w in range(len(widths)):
        sizes = (S0, S1, widths[w])
        domains = finest // widths[w]
        for b in range(domains):
            first = first_member(b, sizes, shape)
            for m in range(ranks // domains):
                t = first + member(m, sizes, shape)
                rows = far[w, m * domains + b]
                loads[w, 3, t] += rows
                loads[w, 4, t] += rows
                wans[w, 1, t // (N * G)] += rows
    return loads, wans


@kernel
def node_totals(rows_RE, home_E, node_size, nodes):
    """(rows[node of the source, node of the home], rows[expert])."""
    rows_NN = np.zeros((nodes, nodes))
    total_E = np.zeros(len(home_E))
    rows_E = np.zeros(len(home_E))
    for k in range(nodes):
        for e in range(len(home_E)):
            rows_E[e] = 0.0
        for x in range(k * node_size, (k + 1) * node_size):
            for e in range(len(home_E)):
                rows_E[e] += rows_RE[x, e]
        for e in range(len(home_E)):
            total_E[e] += rows_E[e]
            rows_NN[k, home_E[e] // node_size] += rows_E[e]
    return rows_NN, total_E


@kernel
def crossing_totals(rows_NN, sent_N, received_N, S0, S1, N):
    """(out, in) of each node beyond its domain's nodes, and (out, in) of each datacenter beyond its domain's.

    sent_N, received_N: the sums of rows_NN, so that only pairs within a domain's datacenters are looked at.
    """
    nodes = len(rows_NN)
    out, in_ = sent_N.copy(), received_N.copy()
    wan_out, wan_in = np.zeros(nodes // N), np.zeros(nodes // N)
    for k in range(nodes):
        wan_out[k // N] += sent_N[k]
        wan_in[k // N] += received_N[k]
    for k in range(nodes):
        low = k // (N * S0) * (N * S0)
        for d in range(low // N, low // N + S0):
            for f in range(d * N, (d + 1) * N):
                rows = rows_NN[k, f]
                wan_out[k // N] -= rows
                wan_in[d] -= rows
                if k % N // S1 == f % N // S1:
                    out[k] -= rows
                    in_[f] -= rows
    return out, in_, wan_out, wan_in
