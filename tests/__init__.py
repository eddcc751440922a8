"""Tests of jattn and its kernels; this module is imported first, also in processes that tests start."""

import gc

# Python collects garbage after 700 new objects by default. Tracing makes millions, few of them in cycles:
# collections took 3 to 5 % of the time of tests that interpret kernels.
gc.set_threshold(100_000)
