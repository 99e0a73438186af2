"""Files in and out, with strict keys. Every error is one line: the file, the place in it, the value, the fix."""

from moeyard.formats.arrays import (
    ROW_BYTES,
    load_demand,
    load_trace,
    load_traffic,
    save_demand,
    save_trace,
    save_traffic,
)
from moeyard.formats.clusters import load_cluster, preset_names, read_cluster_file, save_cluster

__all__ = [
    "ROW_BYTES",
    "load_cluster",
    "load_demand",
    "load_trace",
    "load_traffic",
    "preset_names",
    "read_cluster_file",
    "save_cluster",
    "save_demand",
    "save_trace",
    "save_traffic",
]
