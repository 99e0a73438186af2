"""The papers' tables and figures that a simulator or the lab can give, theirs beside ours."""

from moeyard.reproduce.fast import FAST
from moeyard.reproduce.rails import RAILS
from moeyard.reproduce.tables import Column, Finding, Paper, to_markdown

PAPERS = {"rails": RAILS, "fast": FAST}

__all__ = ["Column", "FAST", "Finding", "PAPERS", "Paper", "RAILS", "to_markdown"]
