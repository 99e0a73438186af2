"""The contention law: what sharing a nic or a wan port costs. Called by whatever follows messages on ports."""

from __future__ import annotations

from moeyard.kernels.compile import kernel


@kernel(inline="always")
def factor(flows, law):
    """How many times longer a port takes while `flows` messages are in progress on it; law: (loss, knee, ceiling)."""
    return min(law[2], 1.0 + law[0] * max(0.0, flows - law[1]))
