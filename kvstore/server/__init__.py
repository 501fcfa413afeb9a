"""The messenger process: one open pool, and all its users."""
