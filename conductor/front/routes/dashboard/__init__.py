"""The page at `/dashboard`: static files, which need no build step and nothing from other hosts.

The page draws the state at `/dashboard/state` (`conductor.telemetry.display`) once a second.
"""
