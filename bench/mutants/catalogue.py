"""All mutants, by where the defect is."""

from __future__ import annotations

from bench.mutants.coding import CODING
from bench.mutants.devices import DEVICES
from bench.mutants.freshness import FRESHNESS
from bench.mutants.planning import PLANNING
from bench.mutants.running import RUNNING
from bench.mutants.training import TRAINING

MUTANTS = [*PLANNING, *TRAINING, *RUNNING, *DEVICES, *FRESHNESS, *CODING]
