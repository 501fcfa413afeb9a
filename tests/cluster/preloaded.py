"""What the processes of a cluster import, imported by the process that they are forked from."""

from conductor import service as conductor
from conductor.front import service as front
from kvstore import service as messenger
from mooncake import commands as supervisor
from workers import service as worker

__all__ = ["conductor", "front", "messenger", "supervisor", "worker"]
