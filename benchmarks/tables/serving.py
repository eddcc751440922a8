"""Tables of what the engine does with a whole model, and of gradients, beside peers."""

from collections.abc import Sequence
from typing import Any

from benchmarks.runner import rows_of


def engine_table(file: str, beside: str) -> str:
    """A row a case; a ratio where the peer ran on the same machine in the same run."""
    ours, theirs = rows_of(file), rows_of(beside)
    peers = {row["what"]: row for row in theirs}  # of two runs of one case the second
    lines = []
    for row in {row["name"]: row for row in ours}.values():
        peer = peers.get(row["name"])
        lines.append([row["name"], _engine_cell(row), _peer_cell(peer), _ratio(row, peer)])
    return _table(ours, f"; {theirs[0]['engine']}", ("case", "jattn", "nano-vllm", "ratio"), lines)


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
    if "gain" in row:
        return f"{row['s']:.2f} s, {row['without_s']:.2f} where no prompt shares: {row['gain']:.2f} x"
    beside = f", {row['in_completions_ms']:.2f} in completions" if "in_completions_ms" in row else ""
    return f"{row['step_ms']:.2f} ms a step{beside}"


def _peer_cell(row: dict[str, float] | None) -> str:
    if row is None:
        return "-"
    where = "" if row["same_run"] else " (another machine)"
    if "step_ms" in row:
        return f"{row['step_ms']:.2f} ms a step{where}"
    took = f"{row['tok_s']:,.0f} tokens/s" if "tok_s" in row else f"ready after {row['s']:.1f} s"
    return took + where


def _ratio(row: dict[str, float], peer: dict[str, float] | None) -> str:
    """Of speeds, where both are known of one run."""
    if peer is None or not peer["same_run"]:
        return "-"
    if "tok_s" in peer:
        return f"{row['tokens_per_s'] / peer['tok_s']:.2f}"
    return f"{peer['step_ms'] / row['step_ms']:.2f}" if "step_ms" in peer else "-"


def cascades_table(file: str) -> str:
    """A decode step that reads a shared prefix once, and one that reads it for each request."""
    rows = rows_of(file)
    keys = ("step_ms", "step_ms_without", "ratio")
    return _table(
        rows,
        "",
        ("requests x shared tokens", "with cascades, ms", "without, ms", "ratio"),
        [[row["name"], *(f"{row[key]:.2f}" for key in keys)] for row in rows],
    )


def gradients_table(file: str) -> str:
    """varlen_backward beside cuDNN, in one run; times of modifiers and masks by the plain case's."""
    rows, lines = rows_of(file), []
    plain = {row["name"]: row["us"] for row in rows if row["modifier"] == "plain"}
    for row in rows:
        is_plain, peer, ours = row["modifier"] == "plain", row.get("cudnn_tflop_per_s"), row["tflop_per_s"]
        beside = ["-", "-"] if peer is None else [f"{peer:.0f}", f"{ours / peer:.2f}"]
        by_plain = "-" if is_plain else f"{row['us'] / plain[row['name']]:.3f}"
        case = row["name"] if is_plain else f"{row['name']} {row['modifier']}"
        forward = [f"{row[key]:,.0f}" for key in ("forward_us", "forward_lse_us")]
        cells = [f"{row['us']:,.0f}", f"{ours:.0f}", *beside, f"{row['share']:.3f}", by_plain, *forward]
        lines.append([case, *cells, f"{max(row['errors'].values()):.4f}"])
    columns = (
        "case", "us", "TFLOP/s", "cuDNN", "ratio", "share of pairs", "time by the plain case's",
        "forward, us", "with an LSE", "largest error",
    )  # fmt: skip
    return _table(rows, "; cuDNN through jax.nn.dot_product_attention", columns, lines)


def drafts_table(file: str) -> str:
    """With drafts and without, in one run."""
    rows, lines = rows_of(file), []
    for row in rows:
        rates = [f"{row[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_s_without")]
        lines.append([row["name"], *rates, f"{row['ratio']:.2f}", str(row["drafted"]), str(row["accepted"])])
    columns = ("case, requests", "tokens/s with drafts", "without", "ratio", "drafted", "accepted")
    return _table(rows, "", columns, lines)


def server_table(file: str) -> str:
    """The engine alone and behind HTTP: what the server costs; rows of 1,024 tokens in, 256 out."""
    rows, lines = rows_of(file), []
    for row in rows:
        rates = [f"{row[f'{who}_tokens_per_s']:,.0f}" for who in ("engine", "server")]
        cells = [row["name"].replace("_", " "), *rates, f"{100 * row['throughput_cost']:.1f} %"]
        for kind in ("time_to_first_token_ms", "inter_token_latency_ms"):
            for who in ("engine", "engine_again", "server"):
                value = row.get(f"{who}_{kind}_p50")
                cells.append("-" if value is None else f"{value:.1f}")
        lines.append(cells)
    columns = ("requests a second", "tokens/s", "served", "cost", "first token, ms", "again", "served")
    columns += ("between two, ms", "again", "served")
    return _table(rows, "", columns, lines)


def _table(
    rows: Sequence[dict[str, Any]], beside: str, columns: Sequence[str], lines: Sequence[Sequence[str]]
) -> str:
    """What ran the rows, what ran beside it, and a table."""
    joined = [" | ".join(line) for line in (columns, *lines)]
    head = [f"{rows[0]['gpu']}, jax {rows[0]['jax']}{beside}.", "", f"| {joined[0]} |"]
    return "\n".join([*head, "|---" * len(columns) + "|", *(f"| {line} |" for line in joined[1:])]) + "\n"
