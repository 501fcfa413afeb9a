"""C++ sources of the messenger. Each .cpp file is compiled and loaded by the module of the same name."""

from pathlib import Path

SOURCES = Path(__file__).parent
