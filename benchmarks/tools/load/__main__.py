"""`python -m benchmarks.tools.load` is `mooncake-bench`."""

from benchmarks.tools.load.cli import main

if __name__ == "__main__":
    main()
