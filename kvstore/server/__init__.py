"""The messenger process: one pool, opened, and all who use it."""
