#!/bin/sh
# An environment for torchtitan beside moeyard: torchtitan 0.3.0 wants other versions of some packages than moeyard's own
# environment has, and triton. Its MoE layers need none of what its data loaders and loggers import, so those are left out.
#
#   sh examples/titan_environment.sh [folder]
#
# torch is the version that moeyard is tested with; which build of it is pip's affair: set PIP_EXTRA_INDEX_URL to the index of the build
# that your machine needs.
set -eu
folder=${1:-titan-venv}
here=$(cd "$(dirname "$0")/.." && pwd)
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet -c "$here/constraints.txt" "$here[torch]"
"$folder/bin/pip" install --quiet --no-deps "torchtitan==0.3.0" "spmd_types==0.2.3" triton torchdata torch_checkpointing
"$folder/bin/pip" install --quiet einops tyro
"$folder/bin/python" -c "import moeyard.titan; print('torchtitan and moeyard:', moeyard.titan.Dispatcher)"
echo "next: $folder/bin/torchrun --nproc-per-node 4 examples/titan_moe.py"
