"""`python -m moeyard`."""

from moeyard.cli import main

main()
