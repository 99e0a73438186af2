"""Plans, simulates and runs the communication of expert-parallel Mixture-of-Experts training."""
