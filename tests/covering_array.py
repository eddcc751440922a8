"""Pairwise covering arrays: few cases in which each two values of any two factors occur together.

`select_each_value` selects fewer, for tests on a GPU, which compile a kernel for each case.
"""

import functools
import itertools
import random
from collections.abc import Callable, Sequence


def covering_array(
    factors: dict[str, list],
    allowed: Callable[[dict], bool] | None = None,
    *,
    tries: int = 60,
    seed: int = 0,
) -> list[dict]:
    """Return cases over `factors` that contain each pair of values that some allowed case contains.

    `allowed` must accept partial cases (missing factors) unless they already break a rule; None = all cases.
    With `allowed`, values must be hashable.
    """
    if allowed is None:  # the numbers of values determine the cases
        values = tuple((name, tuple(range(len(factors[name])))) for name in factors)
    else:
        values = tuple((name, tuple(factors[name])) for name in factors)
    indices = _covering_indices(values, allowed, tries, seed)
    return [{name: factors[name][case[name]] for name in factors} for case in indices]


@functools.cache  # several modules have the same cases
def _covering_indices(values, allowed, tries: int, seed: int) -> list[dict[str, int]]:
    """Return the index of each factor's value for each case of `covering_array`."""
    factors = dict(values)
    rng = random.Random(seed)
    names = list(factors)
    choices = [(name, index) for name in names for index in range(len(factors[name]))]
    bit_of = {choice: 1 << number for number, choice in enumerate(choices)}
    left = [
        ((a, x), (b, y))
        for (a, x), (b, y) in itertools.combinations(choices, 2)
        if a != b and (allowed is None or allowed({a: factors[a][x], b: factors[b][y]}))
    ]
    left.sort()
    missing = dict.fromkeys(
        choices, 0
    )  # for each choice a bit mask of the choices that it must still be combined with
    for value, other_value in left:
        missing[value] |= bit_of[other_value]
        missing[other_value] |= bit_of[value]
    cases = []
    while left:
        tried = [_candidate(factors, bit_of, missing, rng.choice(left), allowed, rng) for _ in range(tries)]
        best = max((c for c in tried if c), key=lambda c: _gain(c, bit_of, missing), default=None)
        if best is None or _gain(best, bit_of, missing) == 0:
            raise AssertionError(f"no allowed case has any of {left[:3]}")
        pair_bits = _bits(best, bit_of)
        for choice in best.items():
            missing[choice] &= ~pair_bits
        left = [(value, other_value) for value, other_value in left if missing[value] & bit_of[other_value]]
        cases.append(best)
    return cases


def select_each_value(cases: Sequence[dict], *, pairs_of: Sequence[str] = ()) -> list[dict]:
    """Return a few of the cases that contain every value of each factor that occurs in `cases`.

    Args:
        cases: Cases with the same factors, whose values are hashable.
        pairs_of: Factors of which every pair of values that occurs in `cases` must occur, too.
    """

    def contents(case: dict) -> set[tuple]:
        pairs = itertools.combinations([(name, case[name]) for name in pairs_of], 2)
        return {*case.items(), *pairs}

    left, selected = set().union(*map(contents, cases)), []
    while left:
        selected.append(max(cases, key=lambda case: len(contents(case) & left)))
        left -= contents(selected[-1])
    return selected


def _bits(case: dict[str, int], bit_of: dict[tuple[str, int], int]) -> int:
    return sum(bit_of[choice] for choice in case.items())


def _gain(
    case: dict[str, int], bit_of: dict[tuple[str, int], int], missing: dict[tuple[str, int], int]
) -> int:
    """Return twice the number of pairs in the case that no earlier case contains."""
    pair_bits = _bits(case, bit_of)
    return sum((missing[choice] & pair_bits).bit_count() for choice in case.items())


def _candidate(factors, bit_of, missing, start, allowed, rng) -> dict[str, int] | None:
    """Return a case that is grown greedily from the uncovered pair `start`, or None."""
    case = dict(start)
    pair_bits = _bits(case, bit_of)
    grown = {name: factors[name][index] for name, index in start}
    rest = [name for name in factors if name not in case]
    rng.shuffle(rest)
    for name in rest:
        options = []
        for index, value in enumerate(factors[name]):
            if allowed is None or allowed(grown | {name: value}):
                options.append(((missing[name, index] & pair_bits).bit_count(), rng.random(), index))
        if not options:
            return None
        case[name] = max(options)[2]
        pair_bits |= bit_of[name, case[name]]
        grown[name] = factors[name][case[name]]
    return case
