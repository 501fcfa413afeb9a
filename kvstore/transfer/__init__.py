"""Blocks between pools: sends layer by layer, fetches, grants of pages to write."""
