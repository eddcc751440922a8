"""Builders of layer specifications."""

from jattn.models.families.layer_builders import alibi_slopes


def test_alibi_slopes_for_head_counts_that_are_not_powers_of_two():
    assert alibi_slopes(4) == (0.25, 0.0625, 0.015625, 0.00390625)
    assert alibi_slopes(6) == (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    assert alibi_slopes(2, 16.0) == (2**-8, 2**-16)
