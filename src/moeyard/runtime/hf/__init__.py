"""Hugging Face models over a yard. transformers is imported when a function needs it, not before."""

from moeyard.runtime.hf.initial import initialise
from moeyard.runtime.hf.parallelize import parallelize

__all__ = ["initialise", "parallelize"]
