"""Simulated decode instances: sequences before and in the batch, and their migrations."""
