"""What `jattn` does for each of its commands."""
