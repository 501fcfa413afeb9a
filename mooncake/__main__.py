"""`python -m mooncake` is `mooncake-serve`."""

from mooncake.cli.main import main

if __name__ == "__main__":
    main()
