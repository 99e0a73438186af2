"""Checkpoints of a training: parameters and optimizer state by logical expert, whatever the ranks."""
