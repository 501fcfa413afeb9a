"""What messengers need, imported and loaded: by the process that they are forked from."""

import gc

from tests import native
from tests.kvstore import forked

__all__ = ["forked"]

native.load()
gc.freeze()  # else each process looks through all of it, and copies its pages
