"""The code blocks of the documents, and how they are run.

A page's Python blocks run one after another in one process (one a rank, where the page needs ranks), then its shell blocks,
all in one empty folder. A shell block that is not run says why in a comment right above it: <!-- not run: why -->.

    python tests/pages.py FOLDER RANKS:PAGE ...     the Python blocks of several pages; torch is imported once
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("python", "sh", "text", "toml")
EXEMPT = re.compile(r"<!-- not run: (\S.*?) -->$")


@dataclass(frozen=True)
class Block:
    kind: str
    line: int  # of its first line of code
    code: str
    exempt: str = ""  # why it is not run


def pages() -> list[str]:
    return ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> list[Block]:
    """Every fenced block. One without an end or a kind, or code that is only indented, is an error: nobody would run it."""
    found: list[Block] = []
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        if lines[i].startswith("```"):
            kind = lines[i].removeprefix("```").strip()
            if kind not in KINDS:
                raise ValueError(f"line {i + 1}: a block of kind {kind!r}; write one of {', '.join(KINDS)}")
            if "```" not in lines[i + 1 :]:
                raise ValueError(f"line {i + 1}: a block without an end")
            end = lines.index("```", i + 1)
            reason = EXEMPT.search(lines[i - 1]) if i else None
            found.append(
                Block(kind, i + 2, "\n".join(lines[i + 1 : end]) + "\n", reason[1] if reason else "")
            )
            i = end
        elif lines[i].startswith("    ") and i and not lines[i - 1].strip():
            raise ValueError(
                f"line {i + 1}: indented code; put it between ```sh, ```python or ```text and ```"
            )
        i += 1
    return found


def of_kind(page: str, kind: str) -> list[Block]:
    return [block for block in blocks((ROOT / page).read_text(encoding="utf-8")) if block.kind == kind]


def run_python(page: str) -> None:
    """All Python blocks in one namespace; a traceback names the page and its line."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in of_kind(page, "python"):
        exec(compile("\n" * (block.line - 1) + block.code, str(ROOT / page), "exec"), names)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_rank(page: str, folder: Path, rank: int, ranks: int, port: int) -> None:
    """This process becomes a rank, as torchrun would start it, and writes `ok` or its traceback."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
    }
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(folder)
    try:
        run_python(page)
        said = "ok"
    except BaseException:
        said = traceback.format_exc()
    (folder / f".rank{rank}").write_text(said)


def main() -> None:
    import torch
    import torch._dynamo  # the first optimizer would
    import torch.distributed
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401  before the fork: once for all pages

    import moeyard.runtime  # noqa: F401  likewise

    torch.set_num_threads(1)
    root, limit = Path(sys.argv[1]), float(sys.argv[2])
    for number, job in enumerate(sys.argv[3:]):
        ranks, _, page = job.partition(":")
        folder, port, children = root / str(number), free_port(), []
        folder.mkdir()
        for rank in range(int(ranks)):
            child = os.fork()
            if child == 0:
                run_rank(page, folder, rank, int(ranks), port)
                sys.stdout.flush()
                os._exit(0)
            children.append(child)
        end = time.monotonic() + limit
        while children and time.monotonic() < end:
            children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
            time.sleep(0.05)
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
