"""Bytes between two messengers over sockets: TCP, with or without TLS, frames, congestion control."""
