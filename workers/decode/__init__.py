"""Decode: continuous batching, from reserved pages to the last token."""
