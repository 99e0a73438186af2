"""What this machine has: each probe looks, and says what its thing is good for."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from moeyard.units import show_bytes


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked for."""

    name: str
    found: bool
    value: str  # what it is, or why it is missing
    enables: str


def findings() -> list[Finding]:
    """Everything, in the order in which it matters."""
    return [
        Finding("cpu", True, f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores", "planning, simulation"),
        Finding("memory", True, _memory(), "large clusters in the simulator; many ranks in the lab"),
        Finding(
            "python",
            True,
            f"{platform.python_version()} on {platform.system()} {platform.release()}",
            "everything",
        ),
        *(_package(name, enables) for name, enables in _PACKAGES.items()),
        _kernels(),
        *_torch(),
        _nics(),
        _rdma(),
        _namespaces(),
        _tun(),
        _chromium(),
    ]


_PACKAGES = {
    "numpy": "everything",
    "numba": "the compiled kernels of planning and simulation",
    "torch": "moeyard.runtime, train, lab: pip install 'moeyard[torch]'",
    "transformers": "expert parallelism for Hugging Face models: pip install 'moeyard[hf]'",
    "pyroute2": "the emulated network of the lab: pip install 'moeyard[lab]'",
    "starlette": "watch, demo, train --live: pip install 'moeyard[live]'",
    "distributed": "replay --backend dask: pip install 'moeyard[dask]'",
}


def _package(name: str, enables: str) -> Finding:
    try:
        return Finding(name, True, metadata.version(name), enables)
    except metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", enables)


def _kernels() -> Finding:
    """Where compiled kernels are kept, and how many there are for these sources, this numba and this processor."""
    from moeyard.kernels import compile as objects

    enables = "answers without waiting for the compiler: `moeyard warm` makes all of them"
    where = objects.folder()
    if where is None:
        tried = ", ".join(map(str, objects.places()))
        return Finding(
            "kernels", False, f"kept nowhere: cannot write to {tried}; set XDG_CACHE_HOME", enables
        )
    made = sum(name.endswith(".code") for name in objects.kept())
    return Finding("kernels", True, f"{made} compiled, kept in {where}", enables)


def _torch() -> list[Finding]:
    """Backends and devices, as torch itself sees them."""
    backends: dict[str, Callable[[], bool]] = {}
    gpus: list[str] = []
    why = "torch is not installed"
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        pass
    else:
        backends = (
            {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available} if dist.is_available() else {}
        )
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        build = torch.version.cuda or torch.version.hip
        why = "no device found" if build else "this torch is built for CPU only"
    usable = [name for name, available in backends.items() if available()]
    gloo, nccl = "gloo" in usable, "nccl" in usable
    return [
        Finding("gloo", gloo, "available" if gloo else "not in this torch", "exchanges between CPU ranks"),
        Finding("nccl", nccl, "available" if nccl else "not in this torch", "exchanges between GPU ranks"),
        Finding("gpus", bool(gpus), _counted(gpus) or why, "training on GPUs; `measure` of their rates"),
    ]


def _counted(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return _lscpu() or platform.machine()


def _lscpu() -> str | None:
    """The model where /proc does not spell it out, as on Arm."""
    command = shutil.which("lscpu")
    if command is None:
        return None
    result = subprocess.run([command], capture_output=True, text=True, timeout=10, check=False)
    named = dict(line.partition(":")[::2] for line in result.stdout.splitlines())
    return named.get("Model name", "").strip() or None


def _memory() -> str:
    sizes = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if " kB" in line
    }
    if "MemTotal" not in sizes:
        return "unknown"
    return f"{show_bytes(sizes['MemTotal'])}, {show_bytes(sizes.get('MemAvailable', 0))} available"


def _nics() -> Finding:
    names = sorted(p.name for p in Path("/sys/class/net").glob("*") if p.name != "lo")
    shown = [f"{name}{_speed(name)}" for name in names]
    return Finding("nics", bool(names), ", ".join(shown) or "only loopback", "exchanges between machines")


def _speed(name: str) -> str:
    try:
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
    except (OSError, ValueError):  # virtual nics have no speed
        return ""
    return f" ({speed} Mbit/s)" if speed > 0 else ""


def _rdma() -> Finding:
    names = sorted(p.name for p in Path("/sys/class/infiniband").glob("*"))
    return Finding("rdma", bool(names), ", ".join(names) or "no device", "rails at full rate under NCCL")


def _namespaces() -> Finding:
    enables = "the lab: nodes and rails emulated on this machine, without root"
    unshare = shutil.which("unshare")
    if unshare is None:
        return Finding("namespaces", False, "no `unshare` command (util-linux)", enables)
    try:
        result = subprocess.run(
            [unshare, "-rnm", "true"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("namespaces", False, f"`unshare -rnm` failed: {error}", enables)
    if result.returncode:
        return Finding("namespaces", False, f"refused: {' '.join(result.stderr.split())}", enables)
    return Finding("namespaces", True, "user, network and mount namespaces allowed", enables)


def _tun() -> Finding:
    enables = "delay on the lab's wan links where the kernel has no netem"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return Finding("tun", False, f"/dev/net/tun: {error.strerror}", enables)
    return Finding("tun", True, "/dev/net/tun opens", enables)


def _chromium() -> Finding:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return Finding("chromium", bool(found), found or "not installed", "the tests that look at report pages")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # not Linux, or hidden
        return []
