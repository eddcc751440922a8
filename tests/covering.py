"""A pairwise covering array: few cases in which every two choices of any two factors meet."""

import itertools
import random
from collections.abc import Callable


def covering_array(
    factors: dict[str, list], allowed: Callable[[dict], bool], *, tries: int = 60, seed: int = 0
) -> list[dict]:
    """Cases over `factors` such that each pair of values that some allowed case has is in one of them.

    `allowed` must accept partial cases (missing factors) unless they already break a rule.
    """
    rng = random.Random(seed)
    names = list(factors)
    pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(range(len(factors[a])), range(len(factors[b])))
        if allowed({a: factors[a][x], b: factors[b][y]})
    }
    cases = []
    while pairs:
        candidates = [_candidate(factors, names, pairs, allowed, rng) for _ in range(tries)]
        best = max((c for c in candidates if c), key=lambda c: len(_covered(c, names) & pairs), default=None)
        gain = _covered(best, names) & pairs if best else set()
        if not gain:
            raise AssertionError(f"no allowed case has any of {sorted(pairs)[:3]}")
        pairs -= gain
        cases.append({name: factors[name][index] for name, index in best.items()})
    return cases


def _covered(case: dict[str, int], names: list[str]) -> set:
    return {((a, case[a]), (b, case[b])) for a, b in itertools.combinations(names, 2)}


def _candidate(factors, names, pairs, allowed, rng) -> dict[str, int] | None:
    """One case, grown greedily around a random uncovered pair."""
    case = dict(rng.choice(sorted(pairs)))
    rest = [name for name in names if name not in case]
    rng.shuffle(rest)
    for name in rest:
        options = []
        for index in range(len(factors[name])):
            grown = {n: factors[n][i] for n, i in case.items()} | {name: factors[name][index]}
            if allowed(grown):
                new = sum(
                    tuple(sorted(((n, i), (name, index)), key=lambda p: names.index(p[0]))) in pairs
                    for n, i in case.items()
                )
                options.append((new, rng.random(), index))
        if not options:
            return None
        case[name] = max(options)[2]
    return {name: case[name] for name in names}
