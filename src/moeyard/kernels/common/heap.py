"""Binary heaps in two arrays, keys and items; equal keys leave in the order of their items."""

from __future__ import annotations

from moeyard.kernels.compile import inner


@inner
def push(key, item, n, k, i):
    """Add (k, i) to a binary heap of n entries; the new length."""
    at = n
    while at > 0:
        up = (at - 1) >> 1
        if key[up] < k or (key[up] == k and item[up] <= i):
            break
        key[at], item[at] = key[up], item[up]
        at = up
    key[at], item[at] = k, i
    return n + 1


@inner
def sink(key, item, n, k, i):
    """Put (k, i) in the place of the least entry of a binary heap of n entries."""
    at = 0
    while True:
        down = 2 * at + 1
        if down >= n:
            break
        right = down + 1
        if right < n and (key[right] < key[down] or (key[right] == key[down] and item[right] < item[down])):
            down = right
        if k < key[down] or (k == key[down] and i <= item[down]):
            break
        key[at], item[at] = key[down], item[down]
        at = down
    key[at], item[at] = k, i


@inner
def pop(key, item, n):
    """Drop the least entry of a binary heap of n entries; the new length."""
    n -= 1
    sink(key, item, n, key[n], item[n])
    return n
