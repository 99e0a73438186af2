"""The kernel's part of a lab: namespaces, and death with the parent."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

NEW_USER, NEW_NET, NEW_MOUNT, NEW_PID = 0x10000000, 0x40000000, 0x00020000, 0x20000000
_PRIVATE, _BIND, _NOSUID_NODEV_NOEXEC, _DETACH = 0x4000 | 0x40000, 0x1000, 0xE, 2
_PR_SET_PDEATHSIG = 1
_SET_FLAGS, _UP = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """A step that this machine does not allow."""

    def __init__(self, step: str, reason: object) -> None:
        super().__init__(f"{step}: {reason}")
        self.step, self.reason = step, str(reason)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def die_with_parent() -> None:
    """Killed when the thread that made this process ends, however it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def own_net() -> int:
    """A handle on the network namespace that this process is in."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_net(handle: int) -> None:
    _check(_libc.setns(handle, NEW_NET), "setns")


def new_net() -> int:
    """Make a network namespace, enter it, and give its handle. It lives as long as a handle or a process in it."""
    unshare(NEW_NET)
    return own_net()


def isolate() -> None:
    """Leave for namespaces of our own: users (where we are root), mounts, processes, network. The next child is the first
    process there; when it ends, however it ends, the kernel ends all the others and the namespaces go.

    A root who may not make user namespaces does without one. Raises Refused, naming the step.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        unshare(NEW_USER)
    except OSError as error:
        if user != 0:
            raise Refused("user namespace", error.strerror) from error
    else:
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError as error:
            raise Refused("user namespace", f"map of users: {error.strerror}") from error
    for flag, name in (
        (NEW_MOUNT, "mount namespace"),
        (NEW_PID, "process namespace"),
        (NEW_NET, "network namespace"),
    ):
        try:
            unshare(flag)
        except OSError as error:
            raise Refused(name, error.strerror) from error
    die_with_parent()  # a change of user forgets it


def raise_loopback() -> None:
    """Let `lo` carry packets in the network namespace that this process is in."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        fcntl.ioctl(line.fileno(), _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))


def furnish(hosts: str) -> str | None:
    """A /proc of the new process namespace and an /etc/hosts of our own, seen in here only. The reason if refused; a lab
    runs without them."""
    try:
        _mount(b"none", b"/", None, _PRIVATE)
        _mount(b"proc", b"/proc", b"proc", _NOSUID_NODEV_NOEXEC)
        _mount(b"none", b"/tmp", b"tmpfs", _NOSUID_NODEV_NOEXEC)  # for a moment: a file that needs no disk
        try:
            Path("/tmp/hosts").write_text(hosts)
            Path("/tmp/hosts").chmod(0o644)
            _mount(b"/tmp/hosts", b"/etc/hosts", None, _BIND)
        finally:
            _check(_libc.umount2(b"/tmp", _DETACH), "unmount /tmp")
    except OSError as error:
        return str(error.strerror)
    return None


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int) -> None:
    _check(_libc.mount(source, target, kind, flags, None), f"mount {target.decode()}")
