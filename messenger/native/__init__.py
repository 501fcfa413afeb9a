"""C++ of the messenger; each file is compiled and loaded by the module that has its name."""

from pathlib import Path

SOURCES = Path(__file__).parent
