"""A rank's own bad argument, as numbers that travel, so that every rank raises the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flaw:
    """A rank's own bad argument. It travels to the others as three numbers, so that all raise the same."""

    code: int
    a: int = 0
    b: int = 0

    def text(self) -> str:
        return FLAWS[self.code].format(a=self.a, b=self.b)


INPUT_ROWS, OUTPUT_ROWS, UNEVEN, NEGATIVE, WRONG_LENGTH, EXPERT_RANGE, WIDTH = 1, 2, 3, 4, 5, 6, 7
FLAWS = {
    INPUT_ROWS: "input has {a} rows, but input_split_sizes sum to {b}",
    OUTPUT_ROWS: "output has {a} rows, but output_split_sizes sum to {b}",
    UNEVEN: "{a} rows do not divide by {b} ranks; give split sizes",
    NEGATIVE: "split size {b} for rank {a} is negative",
    WRONG_LENGTH: "{a} split sizes for {b} ranks; give one per rank",
    EXPERT_RANGE: "a token asks for expert {a}, but experts are 0..{b}",
    WIDTH: "rows of {a} bytes in input and {b} bytes in output; make both alike",
}
