"""The modules that messengers need, imported by the process from which they are forked."""

import gc

from tests import native
from tests.kvstore import forked

__all__ = ["forked"]

native.load()
gc.freeze()  # else each process looks through all of it, and copies its pages
