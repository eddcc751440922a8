import jax
import pytest


@pytest.fixture
def traced_once():
    """Runs a function under jit on several argument tuples of the same shapes; it must be traced once."""

    def run(function, *batches):
        num_traces = 0

        def counted(*args):
            nonlocal num_traces
            num_traces += 1
            return function(*args)

        jitted = jax.jit(counted)
        results = [jitted(*batch) for batch in batches]
        assert num_traces == 1
        return results

    return run
