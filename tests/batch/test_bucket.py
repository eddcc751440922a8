import pytest

from jattn.batch.bucket import default_capture_sizes


@pytest.mark.parametrize(
    ("max_num_seqs", "largest"), [(1, 2), (3, 4), (60, 120), (256, 512), (1000, 512), (None, 512)]
)
def test_the_largest_size_is_twice_the_requests_up_to_512(max_num_seqs, largest):
    assert default_capture_sizes(max_num_seqs)[-1] == largest


def test_capture_sizes_must_not_be_empty():
    with pytest.raises(ValueError, match="max_capture_size must be positive, got 0"):
        default_capture_sizes(0)
