"""Settings that every test shares."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Workers and what they start share the cores; threads that spin for one another would take them from the rest.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what runs in its background deaf to Ctrl-C, and so would be all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Compilation by numba counts as the first example's time, so there is no deadline; pytest-timeout stops a hang.
settings.register_profile(
    "default", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("long", settings.get_profile("default"), max_examples=2000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def rails():
    """Skip where this machine refuses a shaped lab, and say which step it refuses."""
    pytest.importorskip("torch")
    pytest.importorskip("pyroute2")
    from moeyard.lab.check import check

    refused = [f"{step.name}: {step.detail}" for step in check() if step.needed and not step.works]
    if refused:
        pytest.skip(f"no shaped lab on this machine: {'; '.join(refused)}")


@pytest.fixture
def call(capsys, monkeypatch):
    """`moeyard ARGS` in this process: (status, stdout, stderr)."""
    from moeyard.cli import main

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["moeyard", *map(str, args)])
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
