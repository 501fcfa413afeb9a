"""Spans of requests, for an OpenTelemetry collector: their form, and their way out of a process."""
