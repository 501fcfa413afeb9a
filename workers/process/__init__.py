"""The process of a worker: its sessions with messenger and Conductor, its metrics, its end."""
