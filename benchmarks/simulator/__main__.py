"""`python -m benchmarks.simulator` is `mooncake-sim`."""

from benchmarks.simulator.cli import main

if __name__ == "__main__":
    main()
