"""Modules at a helper: another instance has their KVCache, and computes with it."""
