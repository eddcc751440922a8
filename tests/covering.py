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
    rank = {name: i for i, name in enumerate(names)}
    left = sorted(pairs)
    cases = []
    while pairs:
        candidates = [_candidate(factors, rank, pairs, rng.choice(left), allowed, rng) for _ in range(tries)]
        best = max((c for c in candidates if c), key=lambda c: len(_covered(c, names) & pairs), default=None)
        gain = _covered(best, names) & pairs if best else set()
        if not gain:
            raise AssertionError(f"no allowed case has any of {left[:3]}")
        pairs -= gain
        left = [pair for pair in left if pair in pairs]
        cases.append({name: factors[name][best[name]] for name in names})
    return cases


def _covered(case: dict[str, int], names: list[str]) -> set:
    return set(itertools.combinations([(name, case[name]) for name in names], 2))


def _candidate(factors, rank, pairs, start, allowed, rng) -> dict[str, int] | None:
    """One case, grown greedily around the uncovered pair `start`."""
    case = dict(start)
    grown = {name: factors[name][index] for name, index in start}
    rest = [name for name in rank if name not in case]
    rng.shuffle(rest)
    for name in rest:
        before = [choice for choice in case.items() if rank[choice[0]] < rank[name]]
        after = [choice for choice in case.items() if rank[choice[0]] > rank[name]]
        options = []
        for index, value in enumerate(factors[name]):
            if allowed(grown | {name: value}):
                this = (name, index)
                new = sum((other, this) in pairs for other in before)
                new += sum((this, other) in pairs for other in after)
                options.append((new, rng.random(), index))
        if not options:
            return None
        case[name] = max(options)[2]
        grown[name] = factors[name][case[name]]
    return case
