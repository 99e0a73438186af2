"""Hugging Face models over a yard. transformers is imported when a function needs it, not before."""
