"""Experiments about placement: the instances that requests get, and rejections."""
