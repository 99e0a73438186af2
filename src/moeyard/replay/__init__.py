"""A trace replayed on a cluster: every record through planners x schedulers, each planned on what was known before it.

job.py      what is asked for
layer.py    one layer through a block of records, by one planner: what other processes work out
run.py      blocks of records, in parallel; the layers of a record become a step
result.py   what comes out
"""

from moeyard.replay.job import Job
from moeyard.replay.result import Replay, Way
from moeyard.replay.run import replay

__all__ = ["Job", "Replay", "Way", "replay"]
