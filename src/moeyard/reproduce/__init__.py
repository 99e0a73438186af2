"""The papers' tables and figures that a simulator or the lab can give, theirs beside ours."""

from moeyard.reproduce.fast import FAST
from moeyard.reproduce.hybridep import HYBRIDEP
from moeyard.reproduce.prophet import PROPHET
from moeyard.reproduce.rails import RAILS
from moeyard.reproduce.tables import Column, Finding, Paper, to_markdown

PAPERS = {"rails": RAILS, "fast": FAST, "prophet": PROPHET, "hybridep": HYBRIDEP}

__all__ = ["Column", "FAST", "Finding", "HYBRIDEP", "PAPERS", "PROPHET", "Paper", "RAILS", "to_markdown"]
