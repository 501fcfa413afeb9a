"""The page at `/dashboard`: static files that need no build step and nothing from other hosts.

They draw what `/dashboard/state` says (conductor.telemetry.display), once a second.
"""
