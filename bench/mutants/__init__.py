"""Deliberate defects, one at a time, each of which a test that it names must catch: `python -m bench.mutants`."""
