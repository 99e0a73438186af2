"""The experts' arithmetic on one device: routed or grouped rows through their experts, and the experts' initial values."""

from moeyard.runtime.block.experts import GATES, expert_block, grouped_experts
from moeyard.runtime.block.initial import initial_experts
from moeyard.runtime.block.linear import grouped_linear
from moeyard.runtime.block.matmul import grouped_matmul_fits

__all__ = [
    "GATES",
    "expert_block",
    "grouped_experts",
    "grouped_linear",
    "grouped_matmul_fits",
    "initial_experts",
]
