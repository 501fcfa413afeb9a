"""The command `mooncake-serve`: its subcommands, checks before the start, measured costs of this machine."""
