"""The wire protocol, without IO: messages, their order, checksums of payloads."""
