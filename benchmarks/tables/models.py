"""Tables of whole models: engine, server, speculative decoding, cascade attention, decode graphs, quantization, experts."""

from benchmarks.runner import read_rows
from benchmarks.tables.markdown import measured_on, table


def engine_table(file: str, peer_file: str) -> str:
    """Return the engine beside nano-vllm; a speedup where both ran on one machine in one run."""
    rows, peer_rows = read_rows(file), read_rows(peer_file)
    peers = {row["what"]: row for row in peer_rows}  # of two runs of one case, the second
    lines = []
    for row in {row["name"]: row for row in rows}.values():
        peer = peers.get(row["name"])
        lines.append([row["name"], _engine_cell(row), _peer_cell(peer), _speedup(row, peer)])
    head = measured_on(rows, file, f"; {peer_rows[0]['engine']}")
    return head + "\n" + table(("case", "jattn", "nano-vllm", "speedup"), lines)


def _engine_cell(row: dict[str, float]) -> str:
    if "ready_s" in row:
        ready = f"{row['executables_when_ready']} executables after {row['ready_s']:.1f} s"
        return f"{ready}, all {row['executables']} after {row['all_s']:.0f} s"
    if "alone_ms" in row:
        ratio = row["ms"] / row["alone_ms"]
        return f"{row['ms']:.1f} ms, {ratio:.2f} x the prompt alone ({row['alone_ms']:.1f} ms)"
    if "host_waits_ms" in row:
        return f"{row['step_ms']:.2f} ms per step, of which the host waits {row['host_waits_ms']:.2f}"
    if "tokens_per_s" in row:
        return f"{row['tokens_per_s']:,.0f} tokens/s"
    if "gain" in row:
        return f"{row['s']:.2f} s, {row['without_s']:.2f} s if no prompt shares a prefix: {row['gain']:.2f} x"
    completions = f", {row['in_completions_ms']:.2f} in completions" if "in_completions_ms" in row else ""
    return f"{row['step_ms']:.2f} ms per step{completions}"


def _peer_cell(row: dict[str, float] | None) -> str:
    if row is None:
        return "-"
    machine = "" if row["same_run"] else " (another machine)"
    if "step_ms" in row:
        return f"{row['step_ms']:.2f} ms per step{machine}"
    return (f"{row['tok_s']:,.0f} tokens/s" if "tok_s" in row else f"ready after {row['s']:.1f} s") + machine


def _speedup(row: dict[str, float], peer: dict[str, float] | None) -> str:
    if peer is None or not peer["same_run"]:
        return "-"
    if "tok_s" in peer:
        return f"{row['tokens_per_s'] / peer['tok_s']:.2f}"
    return f"{peer['step_ms'] / row['step_ms']:.2f}" if "step_ms" in peer else "-"


def speculative_table(file: str) -> str:
    """Return throughput with and without prompt lookup, in one run."""
    rows = read_rows(file)
    lines = []
    for row in rows:
        rates = [f"{row[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_s_without")]
        lines.append(
            [row["name"], *rates, f"{row['ratio']:.2f}", f"{row['drafted']:,}", f"{row['accepted']:,}"]
        )
    columns = ("case, requests", "tokens/s", "tokens/s without drafts", "speedup", "draft tokens", "accepted")
    return measured_on(rows, file) + "\n" + table(columns, lines)


def cascade_table(file: str) -> str:
    """Return decode steps that read a shared prefix once, and steps that read it for each request."""
    rows = read_rows(file)
    lines = [
        [row["name"], *(f"{row[key]:.2f}" for key in ("step_ms", "step_ms_without", "ratio"))] for row in rows
    ]
    columns = ("requests x shared tokens", "cascade, ms per step", "without, ms per step", "ratio")
    return measured_on(rows, file) + "\n" + table(columns, lines)


def server_table(file: str) -> str:
    """Return the engine alone, the engine again, and the server, for the same requests."""
    rows, lines = read_rows(file), []
    for row in rows:
        rates = [f"{row[f'{who}_tokens_per_s']:,.0f}" for who in ("engine", "server")]
        cells = [row["name"].replace("_", " "), *rates, f"{100 * row['throughput_cost']:.1f} %"]
        for kind in ("time_to_first_token_ms", "inter_token_latency_ms"):
            for who in ("engine", "engine_again", "server"):
                value = row.get(f"{who}_{kind}_p50")
                cells.append("-" if value is None else f"{value:.1f}")
        lines.append(cells)
    columns = ("requests per second", "engine, tokens/s", "server, tokens/s", "cost")
    columns += (
        "first token, ms: engine",
        "engine again",
        "server",
        "between tokens, ms: engine",
        "engine again",
        "server",
    )
    return measured_on(rows, file) + "\n" + table(columns, lines)


def graphs_table(file: str) -> str:
    """Return decode steps of models beside the sum of their kernel times."""
    rows = [row for row in read_rows(file) if "kernel_sum_us" in row]  # an engine's rows have no such sum
    lines = []
    for row in rows:
        kernels, flight = row["kernel_sum_us"], row["in_flight_us"]
        has_buffers = "enable_command_buffer=" not in row["xla_flags"]
        times = [f"{kernels:,.0f}", f"{flight:,.0f}", f"{flight / kernels:.2f}", f"{row['sync_us']:,.0f}"]
        lines.append([row["name"], "yes" if has_buffers else "no", *times])
    columns = (
        "step",
        "command buffers",
        "kernels, us",
        "in flight, us",
        "in flight / kernels",
        "synchronous, us",
    )
    return measured_on(rows, file) + "\n" + table(columns, lines)


def quantization_table(file: str) -> str:
    """Return what each cache format costs a model in bits per byte, the 16-bit cache first."""
    rows = read_rows(file)
    exact, count = rows[0], rows[0]["num_bytes"]
    lines = []
    for row in rows:
        size = row["cache_bytes_per_token"]
        change = "-" if row is exact else f"{(row['bits'] - exact['bits']) / count:+.4f}"
        same, share = 100 * row["same_choices"] / count, 100 * size / exact["cache_bytes_per_token"]
        lines.append(
            [row["cache"], f"{row['bits'] / count:.4f}", change, f"{same:.1f} %", f"{size} ({share:.0f} %)"]
        )
    columns = ("cache", "bits per byte", "difference to 16 bits", "same top-1 byte", "cache bytes per token")
    return measured_on(rows, file, f"; {count:,} bytes of Python sources") + "\n" + table(columns, lines)


def experts_table(file: str) -> str:
    """Return mixture-of-experts models beside the fastest of transformers' implementations."""
    rows = [row for row in read_rows(file) if row.get("by") == "jattn"]
    lines = []
    for row in rows:
        times = [
            row[key] / 1e3
            for key in ("kernel_sum_us", "best_kernel_sum_us", "in_flight_us", "best_in_flight_us")
        ]
        speedup = times[3] / times[2]
        case = {
            "layer": "experts of one layer",
            "decode": "decode, two layers",
            "prefill": "prefill, two layers",
        }
        lines.append(
            [
                row["name"],
                case[row["case"]],
                f"{row['tokens']:,}",
                *(f"{ms:.2f}" for ms in times),
                f"{speedup:.1f}",
            ]
        )
    columns = ("model", "case", "tokens", "kernels, ms", "transformers kernels, ms", "in flight, ms")
    columns += ("transformers in flight, ms", "speedup in flight")
    return measured_on(rows, file) + "\n" + table(columns, lines)


def start_table(file: str) -> str:
    """Return an engine's start times and first-minute share, by the number of cached files."""
    rows = read_rows(file)
    lines = [
        [
            str(row["kept"]),
            *(f"{row[key]:.1f}" if key in row else "-" for key in ("ready_s", "full_speed_s")),
            f"{row['first_minute_share']:.2f}" if "first_minute_share" in row else "-",
        ]
        for row in rows
    ]
    columns = (
        "cached files",
        "seconds until ready",
        "seconds until full speed",
        "tokens of the first minute, of those at full speed",
    )
    return measured_on(rows, file) + "\n" + table(columns, lines)
