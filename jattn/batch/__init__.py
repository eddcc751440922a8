"""Batch metadata of a step: builders on the host, checks, and transitions to the next step."""
