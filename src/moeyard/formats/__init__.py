"""Files in and out, with strict keys. Every error is one line: the file, the place in it, the value, the fix.

All that reads and writes files for the planning core is here. Nouns know no files: the public methods that do
(`Cluster.load`, `StepPlan.save`, `.load`, `Timeline.save`, `.load`, `.to_chrome`) are put on them by the modules here; inside the package call the functions.
"""

from moeyard.formats.arrays import (
    load_demand,
    load_trace,
    load_traffic,
    save_demand,
    save_trace,
    save_traffic,
)
from moeyard.formats.clusters import load_cluster, preset_names, read_cluster_file, save_cluster
from moeyard.formats.schedules import load_schedule, save_schedule
from moeyard.formats.steps import load_step, save_step
from moeyard.formats.timelines import load_timeline, save_chrome, save_timeline
from moeyard.traffic import ROW_BYTES

__all__ = [
    "ROW_BYTES",
    "load_cluster",
    "load_demand",
    "load_schedule",
    "load_step",
    "load_timeline",
    "load_trace",
    "load_traffic",
    "preset_names",
    "read_cluster_file",
    "save_chrome",
    "save_cluster",
    "save_demand",
    "save_schedule",
    "save_step",
    "save_timeline",
    "save_trace",
    "save_traffic",
]
