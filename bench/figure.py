"""Draw docs/schedulers.svg, the README's picture, and write the README's table, both from the golden file.

python -m bench.figure
"""

from __future__ import annotations

import json
from pathlib import Path

from jinja2 import Template

from bench.document import between_marks
from bench.quality import GOLDEN, NAMES, Cell

OUT = Path(__file__).resolve().parent.parent / "docs" / "schedulers.svg"
CELLS = [
    Cell(4, 256, "zipf:0.9", "loss 0.05"),
    Cell(16, 256, "zipf:0.9", "loss 0.05"),
    Cell(40, 256, "zipf:0.9", "loss 0.05"),
]
SHADES = ("#9aa7b5", "#5f7489", "#2f4256")
SVG = Template(
    """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {{ 70 + 46 * rows|length }}" font-family="sans-serif" font-size="13">
<rect width="100%" height="100%" fill="white"/>
<text x="16" y="26" font-size="15" font-weight="bold">All-to-all time over the lower bound (1.0 = no schedule can be faster)</text>
<text x="16" y="46" fill="#555">h200 nodes of 8 ranks, 256 MB per rank, Zipf 0.9 per sender, 5% lost per extra flow on a nic; estimated</text>
{%- for name, bars in rows %}
<text x="88" y="{{ 86 + 46 * loop.index0 }}" text-anchor="end"{% if name == "auto" %} font-weight="bold"{% endif %}>{{ name }}</text>
{%- set y = 62 + 46 * loop.index0 %}
{%- for value in bars %}
<rect x="96" y="{{ y + 13 * loop.index0 }}" width="{{ '%.1f' % (value * scale) }}" height="11" fill="{{ '#1a9850' if name == 'auto' else shades[loop.index0] }}"/>
<text x="{{ '%.1f' % (100 + value * scale) }}" y="{{ y + 10 + 13 * loop.index0 }}" font-size="11">{{ '%.2f' % value }}{{ '   ' ~ nodes[loop.index0] ~ ' nodes' if name == first }}</text>
{%- endfor %}
{%- endfor %}
<line x1="{{ 96 + scale }}" y1="58" x2="{{ 96 + scale }}" y2="{{ 60 + 46 * rows|length }}" stroke="#d73027" stroke-dasharray="4 3"/>
</svg>
"""
)


README = Path(__file__).resolve().parent.parent / "README.md"
COLUMNS = ("direct", "ecmp", "rails", "fast", "auto")


def quality_table(golden: dict[str, dict[str, float]]) -> str:
    """The README's rows: time over bound at 256 MB per rank."""
    lines = [f"| 256 MB per rank | law | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for kind in ("balanced", "zipf:0.9", "hot", "sparse:0.1"):
        for nodes in (4, 40):
            for law in ("ideal", "loss 0.05"):
                ratios = golden[str(Cell(nodes, 256, kind, law))]
                figures = " | ".join(f"{ratios[name]:.2f}" for name in COLUMNS)
                lines.append(f"| {kind}, {nodes} nodes | {law.split()[0]} | {figures} |")
    return "\n".join(lines)


def with_table(readme: str, table: str) -> str:
    """The README with its table replaced."""
    return between_marks(readme, "quality", table)


def main() -> None:
    golden = json.loads(GOLDEN.read_text())
    rows = [(name, [golden[str(cell)][name] for cell in CELLS]) for name in NAMES]
    scale = 600 / max(value for _, bars in rows for value in bars)
    nodes = [cell.nodes for cell in CELLS]
    OUT.write_text(SVG.render(rows=rows, scale=scale, shades=SHADES, nodes=nodes, first=NAMES[0]))
    README.write_text(with_table(README.read_text(), quality_table(golden)))
    print(f"wrote {OUT.name} and {README.name}")


if __name__ == "__main__":
    main()
