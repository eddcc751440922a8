"""Whatever shares the engine with a request, it gets what it would alone, and nothing is left behind."""

import pytest

from tests.serving.random_requests import Crowd

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(
    ("sliding_window", "is_invariant", "is_mixed", "count"),
    [(None, False, False, 240), (24, False, False, 120), (None, True, False, 100), (None, False, True, 80)],
)
def test_many_requests_of_random_parameters_get_what_each_would_alone(
    sliding_window, is_invariant, is_mixed, count
):
    crowd = Crowd(7, sliding_window, is_invariant, is_mixed)
    crowd.run(count)
    crowd.check()
