"""Prompt lookup, compared with a loop over all n-grams."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jattn.serving.engine.proposer import NgramProposer
from jattn.serving.engine.sequence import TokenBuffer


def by_loop(ids, shortest, longest, count):
    """Return the continuation of the first, longest n-gram that the text ends with."""
    for n in range(min(longest, len(ids) - 1), shortest - 1, -1):
        for start in range(len(ids) - n):
            if ids[start : start + n] == ids[-n:]:
                return ids[start + n : start + n + count]
    return []


@hypothesis.given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 6),
)
def test_drafts_are_what_followed_the_first_longest_ngram(ids, shortest, more, count):
    proposer = NgramProposer(prompt_lookup_min=shortest, prompt_lookup_max=shortest + more)
    assert proposer.propose(np.array(ids), count) == by_loop(ids, shortest, shortest + more, count)


@pytest.mark.parametrize(
    ("ids", "drafts"),
    [
        ([1, 2, 3, 4, 2, 3], [4, 2, 3]),  # vLLM's example
        ([9, 1, 2, 5, 1, 2, 6, 1, 2], [5, 1, 2]),  # the first of two
        ([0, 1, 2, 5, 0, 1, 2, 6, 0, 1, 2], [5, 0, 1]),  # the longest is the first, too
        ([7, 1, 2, 5, 0, 1, 2, 6, 0, 1, 2], [6, 0, 1]),  # the longest wins over the first
        ([4, 4, 4, 4], [4]),  # it may overlap itself, and ends with the text
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_examples(ids, drafts):
    assert NgramProposer(prompt_lookup_min=2, prompt_lookup_max=3).propose(np.array(ids), 3) == drafts


def test_a_buffer_shows_a_growing_list():
    buffer, ids = TokenBuffer(), []
    for count in (3, 0, 300, 1, 2000):
        ids += range(len(ids), len(ids) + count)
        assert buffer.sync(ids).tolist() == ids


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"prompt_lookup_min": 0}, r"prompt_lookup_min must be in \[1, prompt_lookup_max \(5\)\], got 0\."),
        ({"prompt_lookup_min": 6}, r"prompt_lookup_min must be in \[1, prompt_lookup_max \(5\)\], got 6\."),
    ],
)
def test_invalid_lengths_are_refused(types_unchecked, sizes, message):
    with pytest.raises(ValueError, match=message):
        NgramProposer(**sizes)
