"""One rank of a lab: enters its node, gets torchrun's environment, runs the job."""

from __future__ import annotations

import atexit
import base64
import contextlib
import importlib
import json
import os
import pickle
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from moeyard.cluster import Cluster
from moeyard.lab import spaces, wire
from moeyard.lab.network import MANAGEMENT, Network, management_address, rail_name
from moeyard.lab.spec import LabSpec

ENV = "MOEYARD_LAB"  # the runtime reads it: cluster, interfaces, emulated accelerator
PORT = 29500


def prepare(cluster: Cluster, *, kernels: bool, modules: Sequence[str] = ()) -> None:
    """Import (also `modules`; one that fails here fails on the ranks, which say so), and compile or load the planning kernels, once, before the ranks are forked. No torch operation: its threads
    would not survive the fork."""
    import scipy.optimize  # noqa: F401
    import torch.distributed  # noqa: F401

    import moeyard.runtime  # noqa: F401
    from moeyard.schedulers import SCHEDULERS
    from moeyard.warm import warm_placements, warm_schedules

    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if kernels:
        warm_schedules(cluster, SCHEDULERS)
        warm_placements(cluster, [{"planner": "static"}])


def environment(number: int, spec: LabSpec, network: Network | None, port: int) -> dict[str, str]:
    """What torchrun would set, and the lab's own."""
    from moeyard.runtime.faults.rails import common_rail

    cluster = spec.cluster
    node, local = divmod(number, cluster.ranks_per_node)
    rail = common_rail(cluster, int(cluster.nic_G[local]))
    interface = "lo" if network is None else MANAGEMENT if rail is None else rail_name(rail)
    place = {
        "cluster": spec.seen_json(),
        "shaped": network is not None,
        "interfaces": None if network is None else [rail_name(r) for r in range(cluster.nics_per_node)],
        "management": "lo" if network is None else MANAGEMENT,
    }
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(cluster.num_ranks),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(cluster.ranks_per_node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(cluster.nodes),
        "ROLE_RANK": str(number),
        "ROLE_WORLD_SIZE": str(cluster.num_ranks),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1" if network is None else management_address(cluster, 0),
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        ENV: json.dumps(place),
    }


def be(
    number: int,
    job: dict[str, Any],
    spec: LabSpec,
    network: Network | None,
    line: socket.socket,
    result: int,
) -> NoReturn:
    """Run the job as rank `number`; does not return."""
    code = 1
    try:
        if network is not None:
            spaces.enter_net(network.nodes[number // spec.cluster.ranks_per_node].handle)
        os.environ.update(environment(number, spec, network, job["port"]))
        os.environ[wire.ENV_FD] = str(line.fileno())
        quiet = os.open(os.devnull, os.O_RDONLY)
        os.dup2(quiet, 0)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        value = _run(job)
        if job["results"] is not None:
            with os.fdopen(os.dup(result), "wb") as file:
                pickle.dump(value, file)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _run(job: dict[str, Any]) -> Any:
    if job["kind"] == "script":
        sys.argv = [job["target"], *job["arguments"]]
        sys.path.insert(0, os.path.dirname(os.path.abspath(job["target"])))
        runpy.run_path(job["target"], run_name="__main__")
        return None
    sys.path[:0] = [p for p in job["path"] if p not in sys.path]
    module, _, name = job["target"].partition(":")
    function = getattr(importlib.import_module(module), name)
    return function(**pickle.loads(base64.b64decode(job["arguments"])))
