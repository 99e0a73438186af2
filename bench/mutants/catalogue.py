"""All mutants, by where the defect is."""

from __future__ import annotations

from bench.mutants.ahead import AHEAD
from bench.mutants.coding import CODING
from bench.mutants.devices import DEVICES
from bench.mutants.freshness import FRESHNESS
from bench.mutants.moving import MOVING
from bench.mutants.planning import PLANNING
from bench.mutants.running import RUNNING
from bench.mutants.training import TRAINING

MUTANTS = [*PLANNING, *TRAINING, *RUNNING, *AHEAD, *DEVICES, *FRESHNESS, *CODING, *MOVING]
