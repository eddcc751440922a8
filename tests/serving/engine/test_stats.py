"""The engine's histograms."""

from jattn.serving.engine.stats import Histogram


def test_the_text_of_a_histogram_is_its_mean_and_its_number_of_values():
    histogram = Histogram((1.0, 10.0))
    assert repr(histogram) == "(n=0)"
    for value in (5.0, 7.0):
        histogram.add(value)
    assert repr(histogram) == "mean 6 (n=2)"
