"""The main job: a small Hugging Face MoE trained with plain expert parallelism, with moeyard, or both in turn.

`loop.py` is the training loop, meant to be read and copied; the other files are what it is measured with.
"""

from moeyard.train.options import MODES, Options

__all__ = ["MODES", "Options"]
