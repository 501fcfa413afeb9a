"""`python -m benchmarks.tools.planner` is `mooncake-plan`."""

from benchmarks.tools.planner.cli import main

if __name__ == "__main__":
    main()
