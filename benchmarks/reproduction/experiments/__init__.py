"""The experiments. Each has the figures that a paper published."""
