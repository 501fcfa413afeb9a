"""`mooncake-serve`, the command: its subcommands, checks before the start, costs measured on this machine."""
