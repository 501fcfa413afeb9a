"""`python -m mooncake` is `mooncake-serve`."""

from mooncake.cli import main

if __name__ == "__main__":
    main()
