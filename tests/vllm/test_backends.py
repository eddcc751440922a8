import pytest

from jattn.vllm.backends import (
    PerLayerParameters,
    choose_kv_cache_layout,
    choose_paged_attention_version,
    infer_global_hyperparameters,
)
from tests.golden_cases import golden


@golden("infer_global_hyperparameters")
def test_infer_global_hyperparameters_equals_vllm(case):
    layers = {f"layer{i}": PerLayerParameters(*params) for i, params in enumerate(case["layers"])}
    if "expected_error" in case:
        with pytest.raises(
            ValueError, match=r"layer0 has \(-1, None, 0\.125, False\).*got layer1: \(127, None, 0\.125"
        ):
            infer_global_hyperparameters(layers)
    else:
        shared = infer_global_hyperparameters(layers)
        assert shared == PerLayerParameters(*case["expected"])
        assert (shared.has_same_window_lefts, shared.has_same_all_params) == (True, True)


@pytest.mark.parametrize(
    ("other_layer", "same_windows"),
    [
        ((127, None, 0.125), False),
        ((-1, 30.0, 0.125), True),
        ((-1, None, 0.5), True),
        ((-1, None, 0.125, True), True),
    ],
)
def test_disagreement_is_recorded_when_not_strict(other_layer, same_windows):
    layers = {"a": PerLayerParameters(-1, None, 0.125), "b": PerLayerParameters(*other_layer)}
    shared = infer_global_hyperparameters(layers, strict=False)
    assert shared == layers["a"]
    assert (shared.has_same_window_lefts, shared.has_same_all_params) == (same_windows, False)
    with pytest.raises(ValueError, match="got b: "):
        infer_global_hyperparameters(layers)


def test_error_lists_only_the_differing_layers():
    common, odd = PerLayerParameters(-1, None, 0.125), PerLayerParameters(-1, None, 0.25)
    with pytest.raises(
        ValueError, match=r"got odd: \(-1, None, 0\.25, False\); last: \S+ None, 0\.25, False\)\.$"
    ):
        infer_global_hyperparameters({"first": common, "same": common, "odd": odd, "last": odd})


def test_missing_layers_are_rejected():
    with pytest.raises(ValueError, match=r"per_layer_params must have at least one layer, got \{\}"):
        infer_global_hyperparameters({})


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        ({}, "NHD"),
        ({"default": "HND"}, "HND"),
        ({"connector": "HND"}, "HND"),
        ({"requested": "NHD", "connector": "HND", "default": "HND"}, "NHD"),
    ],
)
def test_layout_precedence_is_request_connector_default(arguments, layout):
    assert choose_kv_cache_layout(**arguments) == layout


@pytest.mark.parametrize("name", ["requested", "connector", "default"])
def test_unknown_layouts_are_rejected(name):
    with pytest.raises(ValueError, match=f"{name} must be one of 'NHD', 'HND', got 'NDH'"):
        choose_kv_cache_layout(**{name: "NDH"})


@golden("paged_attention_v1_v2_rule")
def test_paged_attention_version_equals_vllm(case):
    chosen = choose_paged_attention_version(case["max_seq_len"], case["num_seqs"], case["num_heads"])
    assert chosen == (case["expected_use_v1"], case["max_num_partitions"])


def test_long_contexts_use_v2_for_any_number_of_heads():
    assert choose_paged_attention_version(8192, 1000, 32).use_v1 is True
    assert choose_paged_attention_version(8193, 1000, 32).use_v1 is False


def test_empty_context_is_rejected():
    with pytest.raises(ValueError, match="max_seq_len must be positive, got 0"):
        choose_paged_attention_version(0, 1, 1)
