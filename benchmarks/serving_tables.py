"""Tables of what the engine does with a whole model, beside a peer that ran on another machine."""

from benchmarks.recorded import rows_of


def engine_table(file: str, beside: str) -> str:
    """A row a case; the peer's of another run, so that no ratio stands here."""
    ours, theirs = rows_of(file), rows_of(beside)
    peers = {row["what"]: row for row in theirs}  # of two runs of one case the second
    lines = [
        f"{ours[0]['gpu']}, jax {ours[0]['jax']}; {theirs[0]['engine']}, in another run on another machine.",
        "",
        "| case | jattn | nano-vllm |",
        "|---|---|---|",
    ]
    for row in {row["name"]: row for row in ours}.values():
        lines.append(f"| {row['name']} | {_engine_cell(row)} | {_peer_cell(peers.get(row['name']))} |")
    return "\n".join(lines) + "\n"


def _engine_cell(row: dict[str, float]) -> str:
    if "ready_s" in row:
        counts = f"{row['executables_when_ready']} executables", f"all {row['executables']}"
        return f"ready after {row['ready_s']:.1f} s with {counts[0]}, {counts[1]} after {row['all_s']:.0f}"
    if "alone_ms" in row:
        ratio = row["ms"] / row["alone_ms"]
        return f"{row['ms']:.1f} ms, {ratio:.2f} x that of the prompt alone ({row['alone_ms']:.1f})"
    if "host_waits_ms" in row:
        return f"{row['step_ms']:.2f} ms a step, {row['host_waits_ms']:.2f} of them the host waits"
    if "tokens_per_s" in row:
        return f"{row['tokens_per_s']:,.0f} tokens/s"
    return f"{row['step_ms']:.2f} ms a step"


def _peer_cell(row: dict[str, float] | None) -> str:
    if row is None:
        return "-"
    if "step_ms" in row:
        return f"{row['step_ms']:.2f} ms a step"
    return f"{row['tok_s']:,.0f} tokens/s" if "tok_s" in row else f"ready after {row['s']:.1f} s"


def drafts_table(file: str) -> str:
    """With drafts and without, in one run."""
    rows = rows_of(file)
    lines = [
        f"{rows[0]['gpu']}, jax {rows[0]['jax']}.",
        "",
        "| case, requests | tokens/s with drafts | without | ratio | drafted | accepted |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates = [f"{row[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_s_without")]
        cells = [row["name"], *rates, f"{row['ratio']:.2f}", str(row["drafted"]), str(row["accepted"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
