"""The experts' arithmetic on one device: routed or grouped rows through their experts, and the experts' initial values."""

from moeyard.runtime.block.experts import GATES, expert_block, grouped_experts
from moeyard.runtime.block.initial import initial_experts

__all__ = ["GATES", "expert_block", "grouped_experts", "initial_experts"]
