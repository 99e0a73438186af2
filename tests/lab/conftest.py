import pytest


@pytest.fixture(scope="session")
def rails():
    """Skip where this machine refuses a shaped lab, and say which step it refuses."""
    pytest.importorskip("torch")
    pytest.importorskip("pyroute2")
    from moeyard.lab.check import check

    refused = [f"{step.name}: {step.detail}" for step in check() if step.needed and not step.works]
    if refused:
        pytest.skip(f"no shaped lab on this machine: {'; '.join(refused)}")
