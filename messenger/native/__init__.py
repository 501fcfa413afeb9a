"""C++ sources of the messenger; the module of the same name compiles and loads each file."""

from pathlib import Path

SOURCES = Path(__file__).parent
