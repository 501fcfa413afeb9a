"""The process that runs the Conductor: sockets and clock around the pure policy."""
