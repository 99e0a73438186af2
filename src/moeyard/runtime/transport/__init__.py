"""How the rows of a plan travel: process groups, memory, and one object for each backend."""
