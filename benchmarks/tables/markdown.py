"""Markdown tables, and the sentence that compares a table with its peers."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.runner import run_date


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rows = [f"| {' | '.join(line)} |" for line in (columns, *lines)]
    return "\n".join([rows[0], "|---" * len(columns) + "|", *rows[1:]]) + "\n"


def measured_on(rows: Sequence[dict[str, Any]], file: str, extra: str = "") -> str:
    """Return the line that says where and when rows were measured."""
    return f"{rows[0]['gpu'].upper()}, {run_date(file)}, jax {rows[0]['jax']}{extra}.\n"


def compare(speedups: dict[str, dict[str, float]]) -> str:
    """Return the sentences that sum up speedups over each engine by case; 1.0 is equal speed."""
    sentences = []
    for engine, cases in speedups.items():
        wins = sum(speedup >= 1 for speedup in cases.values())
        slowest = min(cases, key=lambda case: cases[case])
        sentences.append(
            f"Speedup over {engine}: median {statistics.median(cases.values()):.2f}, lowest {cases[slowest]:.2f} "
            f"(`{slowest}`); faster in {wins} of {len(cases)} cases."
        )
    return "\n".join(sentences) + "\n"
