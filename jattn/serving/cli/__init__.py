"""The `jattn` command line: one module for each command."""
