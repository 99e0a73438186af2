"""Plans carried out by torch.distributed: exchanges, expert parallelism and replicas, exact to the last gradient.

yard = Yard(mesh, cluster="h200-4x8", scheduler="auto", planner="quota", slots=1)
all_to_all_single(output, input, output_splits, input_splits, yard)
layer = MoELayer(hidden, inner, experts, top_k, yard)
loss = global_mean(loss_sum, num_labels, yard); loss.backward()
sync_gradients(model, yard); clip_grad_norm_(model, 1.0, yard)
"""

from moeyard.runtime.block import expert_block, grouped_experts, grouped_linear, grouped_matmul_fits
from moeyard.runtime.faults.errors import ExchangeError, Mismatch, RailLost, RankLost
from moeyard.runtime.hf.initial import initialise, materialize
from moeyard.runtime.hf.parallelize import parallelize
from moeyard.runtime.hf.router_loss import router_loss
from moeyard.runtime.layers.ahead import begin_forward, next_step
from moeyard.runtime.layers.autograd import all_to_all_single, exchange_plan
from moeyard.runtime.layers.dispatch import combine, dispatch
from moeyard.runtime.layers.experts import (
    MoELayer,
    RouterState,
    TopKRouter,
)
from moeyard.runtime.layers.gradients import (
    balance_loss,
    clip_grad_norm_,
    dense_parameters,
    expert_parameters,
    global_count,
    global_mean,
    sync_gradients,
    unscale_gradients,
)
from moeyard.runtime.layers.move import move_experts
from moeyard.runtime.layers.rehome import rehome
from moeyard.runtime.layers.replicas import gather_experts
from moeyard.runtime.layers.routes import Route
from moeyard.runtime.layers.share import Share, Stack, expert_modules
from moeyard.runtime.observe.measure import measure, measure_links, remeasure
from moeyard.runtime.observe.routing import Recorder, record, record_text
from moeyard.runtime.state.by_expert import by_expert
from moeyard.runtime.state.checkpoint import (
    Resumed,
    Saving,
    latest,
    load_checkpoint,
    read_tensors,
    save_checkpoint,
    start_checkpoint,
)
from moeyard.runtime.weights.export import export_pretrained
from moeyard.runtime.weights.load import Loaded, from_pretrained, load_pretrained
from moeyard.runtime.yard import Yard

__all__ = [
    "ExchangeError",
    "Loaded",
    "Mismatch",
    "MoELayer",
    "RailLost",
    "RankLost",
    "Recorder",
    "Resumed",
    "Route",
    "RouterState",
    "Saving",
    "Share",
    "Stack",
    "TopKRouter",
    "Yard",
    "all_to_all_single",
    "balance_loss",
    "begin_forward",
    "by_expert",
    "clip_grad_norm_",
    "combine",
    "dense_parameters",
    "dispatch",
    "exchange_plan",
    "expert_block",
    "expert_modules",
    "expert_parameters",
    "export_pretrained",
    "from_pretrained",
    "gather_experts",
    "global_count",
    "global_mean",
    "grouped_experts",
    "grouped_linear",
    "grouped_matmul_fits",
    "initialise",
    "latest",
    "load_checkpoint",
    "load_pretrained",
    "materialize",
    "measure",
    "measure_links",
    "move_experts",
    "next_step",
    "parallelize",
    "read_tensors",
    "record",
    "record_text",
    "rehome",
    "remeasure",
    "router_loss",
    "save_checkpoint",
    "start_checkpoint",
    "sync_gradients",
    "unscale_gradients",
]
