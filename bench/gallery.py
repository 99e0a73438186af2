"""The pages of docs/gallery.md: its own commands make them.

    python -m bench.gallery [--only TEXT] [--pictures]

Runs the page's shell blocks in out/gallery. `make docs` does so, and the site then has the pages: this file is also a hook of mkdocs.
--pictures: draw the top of each page into docs/gallery-NAME.png, by a headless Chromium. --only: blocks that have this text.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, PAGES = ROOT / "docs" / "gallery.md", ROOT / "out" / "gallery"
LINK = re.compile(r"\(gallery/([\w-]+)\.html\)")
SIZE = 1200, 800


def blocks(text: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", text, re.S | re.M)


def make_pages(only: str = "") -> None:
    """Run the blocks one after another in one folder. The first that fails ends it."""
    PAGES.mkdir(parents=True, exist_ok=True)
    command = f'moeyard() {{ "{sys.executable}" -m moeyard "$@"; }}\n'
    for block in blocks(PAGE.read_text(encoding="utf-8")):
        if only not in block:
            continue
        print(block.strip(), flush=True)
        done = subprocess.run(
            ["bash", "-eu", "-c", command + block], cwd=PAGES, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"docs/gallery.md: status {done.returncode} of\n{block}{done.stderr[-2000:]}")


def draw(name: str, browser: str) -> None:
    picture, (width, height) = ROOT / "docs" / f"gallery-{name}.png", SIZE
    subprocess.run(
        [
            browser, "--headless=new", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=8000",
            f"--window-size={width},{height}", f"--screenshot={picture}", (PAGES / f"{name}.html").as_uri(),
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: the pages that the gallery links to are files of the site."""
    from mkdocs.structure.files import File

    for name in LINK.findall(PAGE.read_text(encoding="utf-8")):
        path = PAGES / f"{name}.html"
        if not path.exists():
            raise SystemExit(f"{path.relative_to(ROOT)} is not there: python -m bench.gallery, or make docs")
        files.append(File.generated(config, f"gallery/{name}.html", abs_src_path=str(path)))
    return files


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="blocks that have this text")
    parser.add_argument("--pictures", action="store_true", help="also draw docs/gallery-NAME.png")
    options = parser.parse_args()
    make_pages(options.only)
    if options.pictures:
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        if browser is None:
            raise SystemExit("pictures are drawn by Chromium: apt-get install chromium")
        for name in LINK.findall(PAGE.read_text(encoding="utf-8")):
            if (PAGES / f"{name}.html").exists():
                draw(name, browser)


if __name__ == "__main__":
    main()
