"""HTTP/1.1: listeners, connections, certificates, bounded bodies, work beside the event loop."""
