"""Plans carried out by torch.distributed: exchanges, expert parallelism and replicas, exact to the last gradient.

yard = Yard(mesh, cluster="h200-4x8", scheduler="auto", planner="quota", slots=1)
all_to_all_single(output, input, output_splits, input_splits, yard)
layer = MoELayer(hidden, inner, experts, top_k, yard)
"""

from moeyard.runtime.autograd import all_to_all_single, exchange_plan
from moeyard.runtime.faults import ExchangeError, Mismatch, RankLost
from moeyard.runtime.groups import Yard

__all__ = [
    "ExchangeError",
    "Mismatch",
    "RankLost",
    "Yard",
    "all_to_all_single",
    "exchange_plan",
]
