"""Bytes between two messengers over sockets: TCP with and without TLS, frames, congestion control."""
