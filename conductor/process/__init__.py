"""The process that runs the Conductor: sockets and clocks around the pure policy."""
