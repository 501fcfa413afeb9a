"""The costs of a running server that a worker's profile lacks, measured by closed loops."""
