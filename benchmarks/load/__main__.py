"""`python -m benchmarks.load` is `mooncake-bench`."""

from benchmarks.load.cli import main

if __name__ == "__main__":
    main()
