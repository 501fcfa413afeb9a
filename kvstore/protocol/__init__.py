"""Messages between a pool and its users, over a Unix socket and over TCP."""
