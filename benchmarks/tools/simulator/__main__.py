"""`python -m benchmarks.tools.simulator` is `mooncake-sim`."""

from benchmarks.tools.simulator.cli import main

if __name__ == "__main__":
    main()
