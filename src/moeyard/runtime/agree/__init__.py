"""What the ranks agree on before rows move: views of the world, counts, order of calls, plans."""
