"""Spans of requests, for an OpenTelemetry collector: what they are, and how they leave a process."""
