"""The modules that processes of a cluster import. They are imported once, before the processes are forked."""

import gc

from transformers import AutoTokenizer

from conductor.front.process import service as front
from conductor.process import service as conductor
from kvstore.server import service as messenger
from mooncake.cli import commands as supervisor
from workers.process import service as worker

__all__ = ["AutoTokenizer", "conductor", "front", "messenger", "supervisor", "worker"]

gc.freeze()  # else each process looks through all of it, which takes 0.2 s and a copy of its pages
