"""How soon threads of one interpreter take turns."""

import contextlib
import sys
from collections.abc import Generator

# With Python's own, 5 ms, a thread that a message has woken waits for the engine's, in the midst of a step's
# work, and the engine's for those that compile, whenever it comes back from a device. With 256 streams in one
# process, a token every 16 ms and 6 ms of the engine's own work in 40 pieces, a step took 29 ms on two slow
# cores, with 0.5 ms 20. A byte that a thread sends back beside one that never rests: 7.1 ms, with 0.5 0.60,
# with 0.1 0.19. Three threads that never rest do 10 % less than with 5 ms, by either.
SWITCH_SECONDS = 0.0001


@contextlib.contextmanager
def short_turns() -> Generator[None]:
    """Within it threads of this process wait for each other no longer; behind it as long as before."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
