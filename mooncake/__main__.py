"""The command `python -m mooncake`, the same as `mooncake-serve`."""

from mooncake.cli.main import main

if __name__ == "__main__":
    main()
