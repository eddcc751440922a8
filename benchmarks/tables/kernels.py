"""Tables of kernel times: decode, prefill, cache writes, sparse attention, gradients and training."""

from typing import Any

from benchmarks.runner import read_rows
from benchmarks.tables.bars import CUDNN, DECODE_PEERS, FA3, FLASHINFER, PREFILL_PEERS
from benchmarks.tables.markdown import compare, measured_on, table

SHORT_NAMES = {FA3: "FA3", FLASHINFER: "FlashInfer", CUDNN: "cuDNN"}  # in the order of the columns
WORKLOAD_SUFFIXES = {"plain": "", "window": "_window1024"}  # of a peer's workload; other modifiers: `_name`

type PeerTimes = dict[str, dict[str, float]]
"""Engine -> workload -> microseconds; engines without a row are absent."""


def peer_times(peer_file: str, engines: dict[str, str]) -> PeerTimes:
    """Return the times of a run's peers.

    Args:
        peer_file: File of the peers' rows.
        engines: Peer name in a row -> engine.
    """
    times: PeerTimes = {}
    for row in read_rows(peer_file):
        if row.get("peer") in engines and "us" in row:
            times.setdefault(engines[row["peer"]], {})[row["workload"]] = row["us"]
    return {engine: times[engine] for engine in SHORT_NAMES if engine in times}


def decode_table(file: str, peer_file: str) -> str:
    """Return decode over 16-bit caches beside the read ceiling and the peers of the same run."""
    ceiling, *rows = read_rows(file)
    rows = [row for row in rows if row.get("quantization", "none") == "none"]
    times = peer_times(peer_file, DECODE_PEERS["none"])
    columns = ["case", "us", "GB/s", "of read ceiling", *_peer_columns(times, ""), "speedup"]
    lines = [[row["name"], *_bandwidth_cells(row, ceiling), *_peer_cells(row, times)] for row in rows]
    head = measured_on(rows, file, f"; read ceiling {ceiling['gb_per_s']:,.0f} GB/s")
    return head + "\n" + compare(_speedups(rows, times)) + "\n" + table(columns, lines)


def quantized_decode_table(file: str, peer_file: str) -> str:
    """Return decode over 8-bit caches beside 16 bits and the peers' fp8 of the same run."""
    ceiling, *rows = read_rows(file)
    full = {row["name"]: row["us"] for row in rows if row["quantization"] == "none"}
    rows = [row for row in rows if row["quantization"] != "none"]
    times = peer_times(peer_file, DECODE_PEERS["fp8_e4m3"])
    columns = ["case", "cache", "us", "GB/s", "of read ceiling", "speedup over 16 bits"]
    columns += [*_peer_columns(times, " fp8"), "speedup"]
    lines = []
    for row in rows:
        cells = [row["name"], row["quantization"], *_bandwidth_cells(row, ceiling)]
        lines.append([*cells, f"{full[row['name']] / row['us']:.2f}", *_peer_cells(row, times)])
    return measured_on(rows, file) + "\n" + table(columns, lines)


def targets_table(file: str) -> str:
    """Return cases by kernels of other architectures, beside the kernel of the measured GPU."""
    rows = read_rows(file)
    native, lines = {}, []
    for row in rows:
        if "us" not in row:  # the read ceiling
            continue
        name = (
            row["name"] if row.get("block_size") is None else f"{row['name']}, blocks of {row['block_size']}"
        )
        architecture = row.get("target") or row.get("variant", "").removeprefix("per_warp_")
        if architecture in ("", "default"):
            native[name], architecture = row["us"], "9.0"
        speed = f"{row['tflop_per_s']:.0f}" if "tflop_per_s" in row else "-"
        lines.append([name, architecture, f"{row['us']:,.0f}", speed, f"{native[name] / row['us']:.2f}"])
    columns = ["case", "kernel for", "us", "TFLOP/s", "speed relative to the kernel for 9.0"]
    return measured_on(rows, file) + "\n" + table(columns, lines)


def _peer_columns(times: PeerTimes, suffix: str) -> list[str]:
    return [f"{SHORT_NAMES[engine]}{suffix}, us" for engine in times]


def _bandwidth_cells(row: dict[str, Any], ceiling: dict[str, Any]) -> list[str]:
    """Return microseconds, GB/s and the share of the read ceiling."""
    share = row["gb_per_s"] / ceiling["gb_per_s"]
    return [f"{row['us']:.1f}", f"{row['gb_per_s']:,.0f}", f"{100 * share:.0f} %"]


def _peer_cells(row: dict[str, Any], times: PeerTimes) -> list[str]:
    """Return each peer's microseconds, and the fastest peer's time over ours."""
    peers = [workloads.get(row["name"]) for workloads in times.values()]
    best = min((us for us in peers if us is not None), default=None)
    cells = ["-" if us is None else f"{us:.1f}" for us in peers]
    return [*cells, "-" if best is None else f"{best / row['us']:.2f}"]


def _speedups(rows: list[dict[str, Any]], times: PeerTimes) -> dict[str, dict[str, float]]:
    """Return each peer's time over ours: engine -> case -> speedup."""
    ours = {row["name"]: row["us"] for row in rows}
    return {
        engine: {case: us / ours[case] for case, us in workloads.items() if case in ours}
        for engine, workloads in times.items()
    }


def prefill_table(file: str, peer_file: str) -> str:
    """Return prefill beside the peers of the same run."""
    rows = read_rows(file)
    times = {size: peer_times(peer_file, names) for size, names in PREFILL_PEERS.items()}
    engines = [engine for engine in SHORT_NAMES if any(engine in peers for peers in times.values())]
    (ceiling,) = [row["value"] for row in read_rows(peer_file) if row.get("ceiling") == "bf16_matmul_TFLOPs"]
    columns = ["case", "keys", "us", "TFLOP/s", *(SHORT_NAMES[engine] for engine in engines), "speedup"]
    lines: list[list[str]] = []
    speedups: dict[str, dict[str, float]] = {engine: {} for engine in engines}
    for row in rows:
        quantization, size = row.get("quantization"), row["block_size"]
        peers = {} if quantization is not None else times[size]  # no peer was timed over 8 bits
        workload = row["name"] + WORKLOAD_SUFFIXES.get(row["modifier"], "_" + row["modifier"])
        peer_us = [peers.get(engine, {}).get(workload) for engine in engines]
        rates = [None if us is None else row["tflop_per_s"] * row["us"] / us for us in peer_us]
        best = max((rate for rate in rates if rate is not None), default=None)
        case = row["name"] + ("" if row["modifier"] == "plain" else f", {row['modifier']}")
        keys = "contiguous" if size is None else f"{quantization or ''} blocks of {size}".strip()
        for engine, rate in zip(engines, rates, strict=True):
            if rate is not None:
                speedups[engine][f"{case}, {keys}"] = row["tflop_per_s"] / rate
        cells = [case, keys, f"{row['us']:,.0f}", f"{row['tflop_per_s']:.0f}"]
        cells += ["-" if rate is None else f"{rate:.0f}" for rate in rates]
        lines.append([*cells, "-" if best is None else f"{row['tflop_per_s'] / best:.2f}"])
    head = measured_on(rows, file, f"; a matrix product reached {ceiling:.0f} TFLOP/s")
    return head + "\n" + compare(speedups) + "\n" + table(columns, lines)


def few_queries_table(file: str, peer_file: str) -> str:
    """Return prefill of few queries after a long context beside FlashAttention-3, with and without splits of the keys."""
    rows = {row["name"]: row for row in read_rows(file) if "heads" in row["tiles"]}
    peers = {(row["workload"], row["peer"]): row["us"] for row in read_rows(peer_file) if "peer" in row}
    lines, speedups = [], {}
    for name, row in rows.items():
        split, unsplit = (peers[name, f"fa3_page16{suffix}"] for suffix in ("", "_one_split"))
        speedups[name] = min(split, unsplit) / row["us"]
        cells = [f"{row['us']:.1f}", f"{split:.1f}", f"{unsplit:.1f}", f"{speedups[name]:.2f}"]
        lines.append([name, *cells])
    head = measured_on(list(rows.values()), file)
    columns = ("case", "us", "FA3, us", "FA3 with one split, us", "speedup")
    return head + "\n" + compare({FA3: speedups}) + "\n" + table(columns, lines)


def quantized_prefill_table(file: str) -> str:
    """Return prefill of few queries over 8-bit caches: dequantized inside the kernel, and by `cache_read` before it."""
    rows = read_rows(file)
    times: dict[tuple[str, str], dict[bool, float]] = {}
    for row in rows:
        times.setdefault((row["name"], row["quantization"]), {})[row["widens"]] = row["us"]
    lines = [
        [*case, *(f"{us[key]:.0f}" if key in us else "-" for key in (True, False))]
        for case, us in times.items()
    ]
    columns = ("case", "cache", "dequantized in the kernel, us", "dequantized before, us")
    return measured_on(rows, file) + "\n" + table(columns, lines)


def write_table(file: str) -> str:
    """Return cache writes, a row per layout and number of tokens, the 16-bit write first."""
    rows = read_rows(file)
    formats = list(dict.fromkeys(row["quantization"] for row in rows))
    lines = []
    for layout, tokens in dict.fromkeys((row["layout"], row["tokens"]) for row in rows):
        us = {
            row["quantization"]: row["us"]
            for row in rows
            if (row["layout"], row["tokens"]) == (layout, tokens)
        }
        cells = [f"{us[name]:.1f}" + (f" ({us[name] / us[None]:.2f})" if name else "") for name in formats]
        lines.append([f"{layout}, {tokens}", *cells])
    columns = ["layout, tokens", "16 bits, us", *(name for name in formats if name)]
    return measured_on(rows, file) + "\n" + table(columns, lines)


def sparse_table(file: str) -> str:
    """Return sparse attention, each case beside the dense kernel of the same run."""
    all_rows = [row for row in read_rows(file) if "density" in row]

    def key(row: dict[str, Any], name: str) -> tuple[Any, ...]:
        return (name, *(row.get(field) for field in ("cache", "page", "wanted")))

    rows = {key(row, row["name"]): row for row in all_rows}
    lines = []
    for row in rows.values():
        if row["name"].startswith("planned_"):
            continue
        planned = rows.get(key(row, f"planned_{row['name']}"))
        cache = (
            f"{row['cache'].replace('none', 'bf16')}, blocks of {row['page']}" if "cache" in row else "bf16"
        )
        reads_more = row.get("read", row["density"]) > row["density"] + 0.001
        density = f"{row['density']:.3f}" + (f", {row['read']:.3f} read" if reads_more else "")
        cells = [row["name"], cache, density, f"{row['us']:,.0f}", f"{row['us'] - row['kernel_us']:.0f}"]
        cells += [f"{row['dense_us'] / row['us']:.2f}", f"{row['of_ideal']:.2f}"]
        cells += ["", ""] if planned is None else [f"{planned['us']:,.0f}", f"{planned['of_ideal']:.2f}"]
        lines.append(cells)
    columns = (
        "case",
        "cache",
        "density",
        "us",
        "of which lists and selection",
        "speedup over dense",
        "of ideal",
    )
    columns += ("us with lists from the plan", "of ideal")
    return measured_on(all_rows, file) + "\n" + table(columns, lines)


def sparse_peers_table(file: str, peer_file: str) -> str:
    """Return the cases that vLLM's block-sparse kernels were timed on in the same run."""

    def key(row: dict[str, Any]) -> tuple[str, str]:
        return row["name"], row.get("cache", "none")

    rows = read_rows(file)
    ours = {key(row): row for row in rows}
    lines = []
    for peer in read_rows(peer_file):
        name, cache = key(peer)
        planned = ours.get((f"planned_{name}", cache))
        cells = [name, cache.replace("none", "bf16"), f"{peer['us']:,.0f}"]
        for row in (ours[name, cache], planned):
            cells += ["", ""] if row is None else [f"{row['us']:,.0f}", f"{peer['us'] / row['us']:.1f}"]
        lines.append(cells)
    columns = ("case", "cache", "vLLM, us", "us", "speedup", "us with lists from the plan", "speedup")
    return measured_on(rows, file) + "\n" + table(columns, lines)


def gradients_table(file: str) -> str:
    """Return the backward pass, beside cuDNN if it is in the run; masks relative to the plain case before them."""
    rows, lines, speedups = read_rows(file), [], {}
    has_peer = any("cudnn_tflop_per_s" in row for row in rows)
    plain = {row["name"]: row["us"] for row in rows if row["modifier"] == "plain"}
    for row in rows:
        is_plain, peer, rate = row["modifier"] == "plain", row.get("cudnn_tflop_per_s"), row["tflop_per_s"]
        case = row["name"] if is_plain else f"{row['name']} {row['modifier']}"
        if peer is not None:
            speedups[case] = rate / peer
        peer_cells = ["-", "-"] if peer is None else [f"{peer:.0f}", f"{rate / peer:.2f}"]
        peer_cells = peer_cells if has_peer else []
        relative = "-" if is_plain else f"{row['us'] / plain[row['name']]:.3f}"
        forward = [f"{row[key]:,.0f}" for key in ("forward_us", "forward_lse_us")]
        cells = [f"{row['us']:,.0f}", f"{rate:.0f}", *peer_cells, f"{row['share']:.3f}", relative, *forward]
        lines.append([case, *cells, f"{max(row['errors'].values()):.4f}"])
    columns = ("case", "us", "TFLOP/s", *(("cuDNN", "speedup") if has_peer else ()))
    columns += (
        "share of pairs",
        "time relative to plain",
        "forward, us",
        "forward with LSE, us",
        "largest error",
    )
    if not has_peer:
        return measured_on(rows, file) + "\n" + table(columns, lines)
    head = measured_on(rows, file, "; cuDNN through jax.nn.dot_product_attention")
    return head + "\n" + compare({CUDNN: speedups}) + "\n" + table(columns, lines)


def training_table(file: str) -> str:
    """Return a layer's forward and backward pass beside the same layer with cuDNN's attention."""
    rows = read_rows(file)
    lines = []
    for row in rows:
        cells = [row["name"]]
        for key in ("us", "attention_us"):
            ours, peer = row[key], row.get(f"cudnn_{key}")
            cells += [
                f"{ours:,.0f}",
                *(["-", "-"] if peer is None else [f"{peer:,.0f}", f"{peer / ours:.2f}"]),
            ]
        plain = row.get("plain_attention_us")
        cells.append("-" if plain is None else f"{row['attention_us'] / plain:.2f}")
        lines.append([*cells, str(row["error"]), str(row["xla_error"])])
    columns = ("case", "layer, us", "layer with cuDNN, us", "speedup", "attention, us", "cuDNN attention, us")
    columns += ("speedup", "attention relative to plain", "error", "error of XLA in 16 bits")
    return measured_on(rows, file) + "\n" + table(columns, lines)
