"""What a pool and its users say to each other, over a Unix socket and over TCP."""
