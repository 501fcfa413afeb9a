"""`python -m benchmarks.planner` is `mooncake-plan`."""

from benchmarks.planner.cli import main

if __name__ == "__main__":
    main()
