"""What this machine allows a lab to do, found by doing it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import util

from moeyard.cluster import Cluster, Port
from moeyard.lab import spaces
from moeyard.lab.network import Network, hosts

_PATIENCE = 120  # seconds


@dataclass(frozen=True, slots=True)
class Step:
    """One thing tried. needed: without it ranks run unshaped on loopback."""

    name: str
    works: bool
    needed: bool
    detail: str = ""


def check() -> list[Step]:
    """Try every step of making a lab, in a process of its own that leaves nothing."""
    steps = [
        Step("pyroute2", util.find_spec("pyroute2") is not None, True, "pip install 'moeyard[lab]'"),
        Step("torch", util.find_spec("torch") is not None, True, "pip install 'moeyard[torch]'"),
    ]
    if not steps[0].works:
        return steps
    from moeyard.lab.launch import host_environment

    command = [sys.executable, "-m", "moeyard.lab.check"]
    try:
        done = subprocess.run(
            command, env=host_environment(), capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return [
            *steps,
            Step("probe", False, True, f"no answer within {_PATIENCE} s: is the machine this busy?"),
        ]
    for line in done.stdout.splitlines():
        name, works, needed, detail = json.loads(line)
        steps.append(Step(name, works, needed, detail))
    if done.returncode:
        steps.append(Step("probe", False, True, done.stderr.strip().splitlines()[-1] if done.stderr else ""))
    return steps


def _say(name: str, works: bool, needed: bool, detail: object = "") -> None:
    print(json.dumps([name, works, needed, str(detail)]), flush=True)


def _probe() -> None:
    """In the process of its own."""
    user = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    spaces.die_with_parent()
    try:
        spaces.isolate()
    except spaces.Refused as refused:
        _say(refused.step, False, True, f"as {user}: {refused.reason}")
        return
    _say("namespaces of users, mounts, processes and networks", True, True, f"as {user}")
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        _probe_inside()
    finally:
        os._exit(0)


def _probe_inside() -> None:
    port = Port(1e6, 1e-3)
    plain = Cluster(2, 1, port, port)
    reason = spaces.furnish(hosts(plain))
    _say("own /proc and /etc/hosts", reason is None, False, reason or "")
    try:
        network = Network(plain)
    except spaces.Refused as refused:
        _say(refused.step, False, True, refused.reason)
        return
    _say("two nodes, bridges, veth pairs, shaping (tbf)", True, True)
    missing = [note for note in network.notes if note.startswith("not settable")]
    _say("patient TCP", not missing, False, missing[0] if missing else "")
    _probe_changes(network)
    try:
        far = Network(plain.but(datacenters=2, wan=port))
    except spaces.Refused as refused:
        _say(refused.step, False, False, f"{refused.reason}; labs of several datacenters need it")
        return
    relayed = any(far.wires)
    _say("netem", not relayed, False, "wan delay by a relay in user space" if relayed else "")
    if relayed:
        _probe_relay()


def _probe_changes(network: Network) -> None:
    try:
        network.slow(0, 0, 0.5)
        network.cut(0, 0)
        network.mend(0, 0)
        _say("break, slow and mend", True, True)
    except Exception as error:
        _say("break, slow and mend", False, True, error)


def _probe_relay() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        _say("relay for wan delay", True, False, "with real-time priority")
    except OSError:
        _say("relay for wan delay", True, False, "without real-time priority: a little less punctual")


if __name__ == "__main__":
    _probe()
