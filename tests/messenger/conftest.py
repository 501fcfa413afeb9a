"""What all tests of this folder need."""

from tests.native import compiled as compiled
