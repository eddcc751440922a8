"""The tuner's choice, from hand-written rows."""

import json

import pytest

from benchmarks.kernels import tune
from benchmarks.kernels.prefill import format_sizes
from pallas_kernels.varlen_prefill.sizes import SHARED_MEMORY


@pytest.mark.parametrize("width", tune.HEAD_DIMS)
def test_candidates_fit_shared_memory_and_differ(width):
    candidates = tune.candidates(width)
    assert all(sizes.shared_memory(width) <= SHARED_MEMORY for sizes in candidates)
    assert len(set(map(format_sizes, candidates))) == len(candidates) > 0


def test_fastest_has_the_least_geometric_mean_of_complete_rows(tmp_path, monkeypatch):
    few, even, uneven, *_ = tune.candidates(64)
    first, second = measured = tune.PREFILL_ROWS[64][:2]
    monkeypatch.setattr(tune, "PREFILL_ROWS", {64: measured})
    times = [
        (even, first, 4.0),
        (even, second, 4.0),
        (uneven, first, 1.0),
        (uneven, second, 15.0),
        (few, first, 9.0),
    ]
    keys = ("name", "block_size", "modifier")
    rows = [dict(zip(keys, row, strict=True), tiles=format_sizes(tiles), us=us) for tiles, row, us in times]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tune.fastest(path) == {64: format_sizes(uneven)}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert tune.fastest(path) == {64: format_sizes(even)}
    path.write_text(json.dumps(rows[-1]))
    assert tune.fastest(path) == {}
