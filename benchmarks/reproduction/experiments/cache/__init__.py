"""Experiments about the contents of the pool: hits by capacity and policy, what they are worth, and what occupies memory."""
