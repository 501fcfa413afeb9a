"""What messengers need, imported and loaded: by the process that they are forked from."""

from tests import native

native.load()
