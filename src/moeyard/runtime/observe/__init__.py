"""What a running model shows: its routing, and what the hardware really does."""
