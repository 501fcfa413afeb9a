"""What messengers need, imported and loaded: by the process that they are forked from."""

from kvstore import service as service
from tests import native

native.load()
