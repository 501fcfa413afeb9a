"""What crosses processes: typed messages, the sockets that carry them, and values that both ends know."""
