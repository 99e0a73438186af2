"""The version, alone, so that a build can read it without importing anything."""

__version__ = "0.2.0"
