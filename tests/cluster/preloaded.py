"""What the processes of a cluster import, at their start and with their model: they are forked with it."""

import gc

from transformers import AutoTokenizer

from conductor import service as conductor
from conductor.front import service as front
from kvstore import service as messenger
from mooncake import commands as supervisor
from workers import service as worker

__all__ = ["AutoTokenizer", "conductor", "front", "messenger", "supervisor", "worker"]

gc.freeze()  # else each process looks through all of it, which takes 0.2 s and a copy of its pages
