"""`moeyard record MODEL TEXT`: the routing of a text through a Hugging Face model, as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moeyard.cli.show import Waiting, check_place, console, notice, print_json, table
from moeyard.errors import InvalidFile
from moeyard.formats import save_trace
from moeyard.trace import Trace


def run(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A local Hugging Face folder, such as export_pretrained writes."
        ),
    ],
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the trace (.npz).")] = Path(
        "trace.npz"
    ),
    ranks: Annotated[
        int, typer.Option(min=1, help="Deal each batch, in order, to so many imagined ranks.")
    ] = 32,
    sequences: Annotated[
        int, typer.Option(min=1, help="Sequences in a batch: one record of the trace.")
    ] = 64,
    length: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 256,
    as_bytes: Annotated[
        bool, typer.Option("--bytes", help="The model reads bytes; the folder needs no tokenizer.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run a model over a text in this process, count what its routers choose, and write a trace for `moeyard plan`."""
    check_place("--out", out)
    trace = _record(model, text, ranks, sequences, length, as_bytes)
    save_trace(trace, out)
    rows = trace.counts.astype("int64").sum(axis=(0, 2))  # [layer, expert]
    busiest = (rows.max(axis=1) / rows.mean(axis=1)).tolist()
    if json:
        facts = {"records": trace.num_records, "ranks": trace.num_ranks, "experts": trace.num_experts}
        print_json({"out": str(out), **facts, "busiest_expert_x_mean": busiest})
        return
    to = console()
    to.print(
        f"{out}: {trace.num_records} records x {trace.num_layers} layers x {trace.num_ranks} ranks x {trace.num_experts} experts"
    )
    lines = table(">layer", ">busiest expert / mean", ">experts never chosen")
    for layer, ratio in enumerate(busiest):
        lines.add_row(str(layer), f"{ratio:.2f}", str(int((rows[layer] == 0).sum())))
    to.print(lines)
    to.print(f"next: moeyard plan CLUSTER {out}")


def _record(model: Path, text: Path, ranks: int, sequences: int, length: int, as_bytes: bool) -> Trace:
    if not (model / "config.json").exists():
        raise InvalidFile(
            f"{model}: no config.json here; give a folder that save_pretrained or export_pretrained wrote"
        )
    content = text.read_bytes()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from moeyard.runtime import record_text

    tokenizer, words = _bytes, content.decode("latin-1")
    if not as_bytes:
        try:
            tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise InvalidFile(f"{model}: no tokenizer here; put one there, or use --bytes") from error
        words = content.decode(errors="replace")
    elif len(content) < sequences * length:
        raise InvalidFile(
            f"{text}: {len(content)} bytes, a batch is {sequences} sequences of {length}; give more text, or smaller --sequences or --length"
        )
    notice(f"loading {model}; then how long the text will take is said after its first batch")
    plain: Any = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
    with Waiting("batches", 1) as waiting:
        how: Any = {"watch": lambda done, of: waiting.update(done, total=of)}
        return record_text(plain, words, tokenizer, ranks=ranks, sequences=sequences, length=length, **how)


def _bytes(text: str) -> list[int]:
    return list(text.encode("latin-1"))
