"""python -m bench.fuzz --count N --seed S [--reader NAME ...] [--only NUMBER] [--json]

Gives each reader N mutated files. A file is fine when one of our errors refuses it or it is read as something valid, in less than
SECONDS of work, with no more than 256 MB plus twice the bytes of what it was made from, and when nothing in it is executed. `--only` makes
one of them again and shows what happens to it.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from random import Random

from bench.asked import at_least
from bench.fuzz.mutate import mutate
from bench.fuzz.readers import READERS
from moeyard.errors import MoeyardError

ROOM, SECONDS = 256 << 20, 20  # bytes; of processor time, so that other work on the machine does not count
PATIENCE = 300  # seconds, for one that waits
CEILING = 6 << 30  # bytes of address space beside what there is: a protection of the machine, not the measure
executed: list[str] = []


def watch(event, arguments):
    if (
        event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.mkdir")
        and watching[0]
    ):
        executed.append(f"{event} {arguments}")


watching = [False]


def high_water() -> tuple[int, int]:
    """(memory held, most memory held since `forget`)."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("VmRSS", "VmHWM")):
            key, size, _ = line.split()
            found[key] = int(size) << 10
    return found["VmRSS:"], found["VmHWM:"]


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Late(BaseException):
    """No reader may take it for an error of its own."""


def late(signum, frame):
    raise Late(f"more than {SECONDS} s of work" if signum == signal.SIGPROF else f"waited {PATIENCE} s")


def make(folder: Path, seeds: list[Path], chance: Random, trap: str) -> tuple[Path, int]:
    """A mutated copy of one of the seeds; and the bytes that an honest one has."""
    seed, other = chance.choice(seeds), chance.choice(seeds)
    if seed.is_file():
        target = folder / f"file{seed.suffix}"
        beside = other if other.suffix == seed.suffix else seed
        target.write_bytes(mutate(seed.name, seed.read_bytes(), beside.read_bytes(), chance, trap))
        return target, honest(seed)
    files = sorted(one for one in seed.rglob("*") if one.is_file())
    victim = chance.choice(files)
    target = folder / "folder"
    for one in files:
        place = target / one.relative_to(seed)
        place.parent.mkdir(parents=True, exist_ok=True)
        content = one.read_bytes()
        if one == victim:
            if chance.random() < 0.03:
                place.unlink(missing_ok=True)
                continue
            content = mutate(one.name, content, content, chance, trap)
        place.write_bytes(content)
    return target, honest(seed)


def honest(seed: Path) -> int:
    files = [seed] if seed.is_file() else [one for one in seed.rglob("*") if one.is_file()]
    return sum(one.stat().st_size for one in files)


def remove(path: Path) -> None:
    if path.is_dir():
        for one in sorted(path.rglob("*"), reverse=True):
            one.rmdir() if one.is_dir() else one.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def one_file(reader, folder, seeds, number, seed, show=False):
    """(refused, read or what was wrong; bytes held at most beside what was held before)."""
    chance, trap = Random(f"{seed}/{reader.name}/{number}"), folder / "trap"
    path, size = make(folder, seeds, chance, str(trap))
    if reader.again is not None:
        reader.again(path, chance)
    size = max(size, honest(path))
    forget()
    before, _ = high_water()
    executed.clear()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(PATIENCE)
    watching[0] = True
    try:
        reader.read(path)
        outcome = "read"
    except (MoeyardError, OSError) as error:
        ours = isinstance(error, MoeyardError) or (isinstance(error, FileNotFoundError) and path.is_dir())
        outcome = "refused" if ours and "\n" not in str(error) else f"wrong: {type(error).__name__}: {error}"
        if show:
            print(f"{type(error).__name__}: {error}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome = f"wrong: {type(error).__name__}: {str(error)[:200]}"
        if show:
            traceback.print_exc()
    finally:
        watching[0] = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    used = high_water()[1] - before
    if executed or trap.exists():
        outcome = f"wrong: executed {executed or trap}"
    elif used > ROOM + 2 * size:
        outcome = f"wrong: held {used >> 20} MB for a file of {size} bytes"
    if show:
        print(outcome, f"{used >> 20} MB", path)
    else:
        remove(path)
    return outcome, used


def campaign(reader, count, seed):
    with tempfile.TemporaryDirectory() as top:
        seeds_at, folder = Path(top) / "seeds", Path(top) / "now"
        seeds_at.mkdir()
        folder.mkdir()
        with reader.ready():
            seeds = reader.make(seeds_at)
            for one in seeds:
                reader.read(one)  # valid, and warm
            start, found, wrong, most = time.perf_counter(), Counter(), [], 0
            for number in range(count):
                outcome, used = one_file(reader, folder, seeds, number, seed)
                most = max(most, used)
                found[outcome.split(":")[0]] += 1
                if outcome.startswith("wrong"):
                    wrong.append({"number": number, "what": outcome})
        return {"reader": reader.name, "files": count, "refused": found["refused"], "read": found["read"], "wrong": wrong,
                "most_mb": most >> 20, "seconds": round(time.perf_counter() - start, 1)}  # fmt: skip


def show_one(reader, number, seed):
    folder = Path(tempfile.mkdtemp())  # stays, to be looked at
    (folder / "seeds").mkdir()
    with reader.ready():
        one_file(reader, folder, reader.make(folder / "seeds"), number, seed, show=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=at_least(1), default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", choices=sorted(READERS))
    parser.add_argument("--only", type=at_least(0), help="the number of one file")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.addaudithook(watch)
    signal.signal(signal.SIGPROF, late)
    signal.signal(signal.SIGALRM, late)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + CEILING, hard))
    bad = 0
    for name in given.reader or READERS:
        reader = READERS[name]
        if given.only is not None:
            show_one(reader, given.only, given.seed)
            continue
        row = campaign(reader, given.count, given.seed)
        bad += len(row["wrong"])
        if given.json:
            print(json.dumps(row), flush=True)
            continue
        print(f"{name:12} {row['files']:6} files: {row['refused']:6} refused, {row['read']:6} read, {len(row['wrong']):4} wrong; "
              f"{row['most_mb']} MB at most, {row['seconds']} s", flush=True)  # fmt: skip
        kinds: dict[str, dict] = {}
        for one in row["wrong"]:
            kinds.setdefault(one["what"][:90], one)
        for one in list(kinds.values())[:20]:
            print(f"    {one['number']}: {one['what'][:300]}")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
