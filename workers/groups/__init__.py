"""Instances of several workers: links between stages of a pipeline and ranks of a tensor-parallel group."""
