"""The main job: a small Hugging Face MoE trained in several modes, step by step in turn.

`loop.py` is the training loop, meant to be read and copied; the other files are what it is measured with.
"""

from moeyard.train.modes import MODES
from moeyard.train.options import Options

__all__ = ["MODES", "Options"]
