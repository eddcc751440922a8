"""Device time of the kernels on the shared cases; a row is printed only if its numbers are right."""
