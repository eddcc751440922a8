"""A fixed sample of fuzzer cases, and tests that the fuzzer detects wrong results."""

import json
import subprocess
import sys

import pytest

from tests.fuzz import cases, pool
from tests.fuzz.draw import draw

SLICE = {
    "mosaic_gpu": (19,),  # a prompt with splits and packed GQA heads
    "xla": (1, 2, 3),
    "reference": range(4),
    "gradients": (1, 2, 3, 7),
    "dense": (1, 2),
    "moves": (*range(10), *range(14, 32)),
}


@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "seed"), [(kind, n) for kind, seeds in SLICE.items() for n in seeds])
def test_random_cases_pass(kind, seed):
    outcome = cases.outcome_of(kind, seed)
    assert outcome["outcome"] in ("passed", "refused"), outcome


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_seed_determines_a_case_of_json_literals(kind):
    case = cases.draw(kind, 7)
    assert case == cases.draw(kind, 7) != cases.draw(kind, 8)
    assert json.loads(json.dumps(case)) == case


def test_every_choice_is_drawn():
    drawn = [draw(kind, seed) for kind in cases.IMPLEMENTATIONS for seed in range(300)]
    for name, least in (
        ("phase", 6),
        ("stored", 10),
        ("kv", 4),
        ("alibi", 3),
        ("planned", 3),
        ("mask_in", 3),
        ("score_mod", 5),
    ):
        assert len({case[name] for case in drawn}) >= least
    assert {case["mask"][0] for case in drawn if case["mask"]} >= {"block", "prefix", "and", "or", "document"}


class TestOutcomes:
    def outcome(self, monkeypatch, error):
        def check(kind, case):
            raise error

        monkeypatch.setattr(cases, "check", check)
        return cases.outcome_of("xla", 0)["outcome"]

    def test_wrong_result_is_reported_as_wrong(self, monkeypatch):
        assert self.outcome(monkeypatch, AssertionError("out is off by 1")) == "wrong"

    def test_error_raised_outside_of_the_library_is_reported_as_a_crash(self, monkeypatch):
        assert self.outcome(monkeypatch, ValueError("operands could not be broadcast")) == "crashed"
        assert self.outcome(monkeypatch, ZeroDivisionError()) == "crashed"

    def test_value_error_for_a_valid_case_is_reported_as_blamed(self):
        case = draw("reference", 0) | {"window": [-1, None]}
        with pytest.raises(ValueError, match="left side must be None or at least 0, got -1") as blamed:
            cases.check("reference", case)
        assert cases.classify_error(blamed.value) == "blamed"

    def test_not_implemented_error_is_reported_as_refused(self):
        case = draw("reference", 0) | {"batch_invariant": True, "mask": None}
        with pytest.raises(NotImplementedError, match="sizes of the bucket") as refused:
            cases.check("reference", case)
        assert cases.classify_error(refused.value) == "refused"

    def test_lost_key_is_reported_as_wrong(self, monkeypatch):
        visibility_of = cases.attention.visibility_of
        monkeypatch.setattr(
            cases.attention,
            "visibility_of",
            lambda case, rule: [x & (x.cumsum(-1) != 1) for x in visibility_of(case, rule)],
        )
        assert cases.outcome_of("xla", 1)["outcome"] == "wrong"


def hang(connection, is_large):
    """Replace pool.work by a worker that never answers."""
    while connection.recv() is not None:
        pass


def test_hanging_case_is_a_timeout(monkeypatch):
    monkeypatch.setattr(pool, "work", hang)
    monkeypatch.setattr(pool.Worker, "is_late", lambda worker, limit: True)
    limits = {"num_workers": 1, "case_seconds": 1, "seconds": 60, "is_large": False}
    (outcome,) = pool.outcomes(iter([("xla", 0)]), **limits)
    assert outcome["outcome"] == "timeout"


@pytest.mark.slow
def test_the_command_writes_every_outcome(tmp_path):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "tests.fuzz", "--implementation", "moves", "--cases", "3", "--jobs", "2"]
    done = subprocess.run([*command, "--out", out], capture_output=True, text=True, check=False)
    assert "moves" in done.stdout
    assert [json.loads(line)["kind"] for line in out.read_text().splitlines()] == ["moves"] * 3
