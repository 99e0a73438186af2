"""What is computed in loops, compiled. A room a folder; `compile` has the decorator, `build` compiles ahead."""

from moeyard.kernels import build

__all__ = ["build"]
