"""The carriers of messages between two parts of the system: ZeroMQ sockets, and queues within one process."""
