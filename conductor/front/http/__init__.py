"""HTTP/1.1: the server, its connections, certificates, bounded bodies."""
