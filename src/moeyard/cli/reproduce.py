"""`moeyard reproduce rails | fast | prophet | hybridep`: a paper's tables, its numbers beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeyard.cli import complete
from moeyard.cli.show import Waiting, check_place, console, print_json, table
from moeyard.errors import MoeyardError, UnknownName

if TYPE_CHECKING:
    from moeyard.reproduce import Finding, Paper


def run(
    paper: Annotated[
        str,
        typer.Argument(
            metavar="PAPER",
            autocompletion=complete.papers,
            help="rails (arXiv 2510.19262), fast (2505.09764), prophet (2411.10003) or hybridep (2510.19470).",
        ),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=complete.tables,
            help="One of its tables by name, may be repeated: of rails completion, symmetry, iteration; of fast bandwidth, h200, synthesis, latency, "
            "megatron; of prophet iteration, balance, model; of hybridep model, data, experts, ablation, map, far.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    document: Annotated[
        Path | None,
        typer.Option(help="Also write the paper's chapter of this Markdown file, such as docs/reproduce.md."),
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Also write an HTML page.")] = None,
) -> None:
    """Do a paper's tables and figures again, by simulation, and say where ours differ and why."""
    from moeyard.report.paper import paper_page
    from moeyard.reproduce import PAPERS

    if paper not in PAPERS:
        raise UnknownName.of("paper", paper, PAPERS)
    chosen = PAPERS[paper]
    for name in only or ():
        if name not in chosen.findings:
            raise UnknownName.of("table", name, chosen.findings)
    if document is not None and only:
        raise MoeyardError("--document writes the whole chapter; leave --only out")
    if document is not None:
        _around(document, chosen)  # before the work, which takes a while
    check_place("--page", page)
    findings = _work(chosen, only or list(chosen.findings))
    if document is not None:
        _write_chapter(document, chosen, findings)
    if page is not None:
        page.write_text(paper_page(chosen, findings).html(), encoding="utf-8")
    if json:
        print_json({"paper": chosen.title, "link": chosen.link, "tables": [f.data() for f in findings]})
        return
    out = console()
    out.print(f"{chosen.title} ({chosen.link})\n")
    from moeyard.reproduce.tables import show, show_origins

    for finding in findings:
        out.print(finding.title, style="bold")
        out.print(f"{show_origins(finding.origins)}. {finding.conditions}")
        lines = table(*(c if i == 0 else f">{c}" for i, c in enumerate(finding.names)))
        for row in finding.rows:
            lines.add_row(*(show(cell) for cell in row))
        out.print(lines)
        out.print(finding.verdict + "\n")
    for what in (document, page):
        if what is not None:
            out.print(f"wrote {what}")


def _work(paper: Paper, names: list[str]) -> list[Finding]:
    found: list[Finding] = []
    with Waiting("tables", len(names)) as waiting:
        for name in names:
            waiting.update(len(found), f"tables of {paper.name}; now {name}")
            found.append(paper.findings[name]())
    return found


def _write_chapter(path: Path, paper: Paper, findings: list[Finding]) -> None:
    """Replace what lies between this paper's marks."""
    from moeyard.reproduce import to_markdown

    before, after = _around(path, paper)
    path.write_text(before + to_markdown(paper, findings) + after, encoding="utf-8")


def _around(path: Path, paper: Paper) -> tuple[str, str]:
    """The text up to the first of this paper's marks and from the last, both with it."""
    first, last = (
        f"<!-- {paper.name}: written by moeyard reproduce {paper.name} -->",
        f"<!-- /{paper.name} -->",
    )
    text = path.read_text(encoding="utf-8")
    if first not in text or last not in text:
        raise MoeyardError(f"{path}: no place for the chapter; put the lines {first!r} and {last!r} into it")
    before, rest = text.split(first, 1)
    if last not in rest:
        raise MoeyardError(f"{path}: {last!r} stands before {first!r}; put it behind")
    return f"{before}{first}\n", last + rest.split(last, 1)[1]
