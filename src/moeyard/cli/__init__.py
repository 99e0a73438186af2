"""The `moeyard` command: one file per subcommand."""

from moeyard.cli.app import app, main

__all__ = ["app", "main"]
