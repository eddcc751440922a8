"""`python -m tests.fuzz`: random cases of attention, plans, writes and block moves, checked in float64.

A failing case prints one line; `--implementation KIND --only SEED` runs it again in this process.
"""

import argparse
import collections
import itertools
import json
import os
import re
import sys
from pathlib import Path

from tests.fuzz import pool

KINDS = ("mosaic_gpu", "xla", "reference", "gradients", "dense", "moves")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.fuzz")
    add = parser.add_argument
    add("--cases", type=int, default=100, help="number of cases of each kind")
    add("--seed", type=int, default=0, help="seed of the first case; later cases use the next seeds")
    add("--implementation", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of cases")
    add("--jobs", type=int, default=1, help="processes")
    add("--out", type=Path, help="JSONL file with one object per case")
    add("--only", type=int, nargs="+", help="run only these seeds in this process and print their cases")
    add("--case-seconds", type=float, default=240.0, help="time limit per case")
    add("--seconds", type=float, default=float("inf"), help="start no case after this time")
    add("--large", action="store_true", help="long requests and many heads; for a GPU")
    return parser.parse_args()


def run_only(args: argparse.Namespace) -> int:
    from tests.fuzz.cases import outcome_of

    num_failed = 0
    for kind, seed in itertools.product(args.implementation, args.only):
        outcome = outcome_of(kind, seed, is_large=args.large)
        print(json.dumps(outcome, indent=2))
        num_failed += is_failure(outcome)
    return num_failed


def is_failure(outcome: dict) -> bool:
    return outcome["outcome"] not in ("passed", "refused")


def line_of(outcome: dict, *, is_large: bool) -> str:
    arguments = f"--implementation {outcome['kind']} --only {outcome['seed']}{' --large' * is_large}"
    return f"{outcome['outcome'].upper()} {arguments}: {' '.join(outcome['detail'].split())[:250]}"


def summary(outcomes: list[dict]) -> str:
    """Return the number of outcomes per kind, and refusals grouped by reason."""
    names = ("passed", "refused", "blamed", "wrong", "crashed", "timeout")
    lines = [f"{'':12}" + "".join(f"{name:>9}" for name in names)]
    for kind in dict.fromkeys(outcome["kind"] for outcome in outcomes):
        counts = collections.Counter(o["outcome"] for o in outcomes if o["kind"] == kind)
        lines.append(f"{kind:12}" + "".join(f"{counts[name]:9}" for name in names))
    reasons = collections.Counter(
        f"{o['kind']}: {re.sub(r'[0-9]+', 'N', o['detail'])[:170]}"
        for o in outcomes
        if o["outcome"] in ("refused", "blamed")
    )
    return "\n".join(lines + [f"{count:6} {reason}" for reason, count in reasons.most_common()])


def main() -> int:
    args = parsed()
    # Many processes share a GPU, and an interpreted warpgroup that waits holds one of XLA's threads.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("NPROC", "16")
    if args.only:
        return min(run_only(args), 1)
    seeds = range(args.seed, args.seed + args.cases)
    jobs = ((kind, seed) for seed in seeds for kind in args.implementation)
    out = args.out.open("w") if args.out else None
    outcomes = []
    limits = {"case_seconds": args.case_seconds, "seconds": args.seconds}
    for outcome in pool.outcomes(jobs, num_workers=args.jobs, is_large=args.large, **limits):
        outcomes.append(outcome)
        if out:
            print(json.dumps(outcome), file=out, flush=True)
        if is_failure(outcome):
            print(line_of(outcome, is_large=args.large), flush=True)
    print(summary(outcomes))
    return int(any(map(is_failure, outcomes)))


if __name__ == "__main__":
    sys.exit(main())
