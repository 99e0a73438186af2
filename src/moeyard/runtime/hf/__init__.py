"""Hugging Face models over a yard. transformers is imported when a function needs it, not before."""

from moeyard.runtime.hf.initial import initialise
from moeyard.runtime.hf.parallelize import parallelize
from moeyard.runtime.hf.router_loss import router_loss

__all__ = ["initialise", "parallelize", "router_loss"]
