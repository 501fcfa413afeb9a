"""Experiments about placement: the choice of instances for requests, and rejections."""
