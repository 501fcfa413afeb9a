"""Rules that follow the load without IO: which requests move, and which roles instances have."""
