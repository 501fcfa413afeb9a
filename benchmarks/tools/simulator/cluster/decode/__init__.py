"""Simulated decode instances: sequences on their way into the batch, in it, and to other instances."""
