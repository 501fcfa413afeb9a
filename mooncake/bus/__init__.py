"""What carries messages between two parts of the system: ZeroMQ sockets, or queues within one process."""
