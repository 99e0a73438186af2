"""Simulation: of the network, and of a training step."""

from moeyard.sim.flow import run, simulate
from moeyard.sim.operations import Course, Operations

__all__ = ["Course", "Operations", "run", "simulate"]
