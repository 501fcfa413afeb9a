"""The lives of accepted requests: waiting, placed, computed, lost with an instance, ended."""
