"""Mutated files for every reader: each is refused by one of our errors or read as something valid, within its memory."""
