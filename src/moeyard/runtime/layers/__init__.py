"""Expert parallelism for models: exchanges with gradients, dispatch and combine, experts, replicas, gradients, moves."""
