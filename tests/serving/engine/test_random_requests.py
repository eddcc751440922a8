"""Random requests get the same tokens as in single runs, and leave no request or block behind."""

import pytest

from tests.serving.engine.random_requests import Crowd

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(
    ("sliding_window", "is_invariant", "is_mixed", "count"),
    [(None, False, False, 100), (24, False, False, 70), (None, True, False, 50), (None, False, True, 40)],
)
def test_random_requests_equal_single_runs(sliding_window, is_invariant, is_mixed, count):
    crowd = Crowd(7, sliding_window, is_invariant, is_mixed)
    crowd.run(count)
    crowd.check()
