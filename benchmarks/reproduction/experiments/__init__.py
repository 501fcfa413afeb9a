"""The experiments, each with the figures that a paper published."""
