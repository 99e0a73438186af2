"""The process that is a lab: it makes the network, forks the ranks into it, and watches over them.

    caller --> host --> first --> rank 0, rank 1, ... (relays)

`first` is the first process of its own process namespace: when it ends, by whatever signal, the kernel ends all ranks. It dies
with `host`, and `host` with the caller; so nothing is left, whoever is killed. Run as `python -m moeyard.lab.host FD`, where FD
gives the job as JSON; numeric libraries must start no threads (the caller's environment sees to that), since a process with
threads may not make a user namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from typing import Any, NoReturn

from moeyard.errors import MoeyardError
from moeyard.lab import spaces, wire
from moeyard.lab.network import Network, hosts
from moeyard.lab.spec import LabSpec
from moeyard.lab.watch import Watch

REFUSED = 70  # exit status when namespaces are refused and were asked for


def main() -> None:
    with os.fdopen(int(sys.argv[1])) as file:
        job = json.load(file)
    spaces.die_with_parent()
    if os.getppid() != job["caller"]:
        os._exit(1)  # the caller died before we could bind ourselves to it
    server = _listen(job["name"])
    shaped, why = True, ""
    try:
        if job["network"] == "loopback":
            raise spaces.Refused("asked for", "unshaped on loopback")
        spaces.isolate()
    except spaces.Refused as refused:
        shaped, why = False, str(refused)
        if job["network"] == "rails":
            _tell(job, f"moeyard lab: {why}; `moeyard lab check` says more")
            os._exit(REFUSED)
    sys.stdout.flush()
    sys.stderr.flush()
    first = os.fork()
    if first == 0:
        _first(job, server, shaped, why)
    server.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: _pass_on(first, got))
    os._exit(_wait(first))


def _listen(name: str) -> socket.socket:
    try:
        return wire.listen(name)
    except OSError as error:
        print(f"moeyard: a lab named {name!r} is running already ({error.strerror})", file=sys.stderr)
        os._exit(2)


def _pass_on(first: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(first, number)


def _wait(child: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _tell(job: dict[str, Any], text: str) -> None:
    if not job["quiet"]:
        print(text, file=sys.stderr, flush=True)


def _first(job: dict[str, Any], server: socket.socket, shaped: bool, why: str) -> NoReturn:
    code = 1
    try:
        spaces.die_with_parent()
        spec = LabSpec.from_json(job["spec"])
        network = None
        if shaped:
            spaces.furnish(hosts(spec.cluster))
            try:
                network = Network(spec.cluster)
            except spaces.Refused as refused:
                if job["network"] == "rails":
                    _tell(job, f"moeyard lab: {refused}; `moeyard lab check` says more")
                    os._exit(REFUSED)
                why = str(refused)
                spaces.raise_loopback()
        _tell(job, describe(job["name"], spec, network, why))
        code = Watch(job, spec, network, server).run()
    except MoeyardError as error:
        print(f"moeyard: {error}", file=sys.stderr)
        code = 2
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def describe(name: str, spec: LabSpec, network: Network | None, why: str) -> str:
    """One line: what runs, and what is not as it seems."""
    c = spec.cluster
    shape = f"{c.nodes} nodes x {c.ranks_per_node} ranks, {c.nics_per_node} rails"
    if network is None:
        return f"moeyard lab {name}: {shape}; UNSHAPED, all ranks on loopback ({why})"
    rate = f"{c.scale_out.bandwidth * 8 / 1e6:g} Mbit/s each"
    parts = [f"moeyard lab {name}: {shape} at {rate}", *network.notes]
    odd = int((c.rails != 1).sum())
    if odd:
        parts.insert(1, f"{odd} rails not at full rate")
    if spec.compute is not None:
        parts.append(f"accelerators emulated at {spec.compute:g} rows/s")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
