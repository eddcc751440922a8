"""The table of a layer's two passes."""

from benchmarks.runner import rows_of


def training_table(file: str) -> str:
    """Rows of the training suite: a layer's two passes beside cuDNN in its place, and the plain case."""
    rows = rows_of(file)
    lines = [
        f"{rows[0]['gpu']}, jax {rows[0]['jax']}.",
        "",
        "| case | layer, us | with cuDNN, us | cuDNN / ours | attention alone, us | cuDNN's | cuDNN / ours "
        "| of the plain case's | error | XLA's in 16 bits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["name"]]
        for key in ("us", "attention_us"):
            ours, peer = row[key], row.get(f"cudnn_{key}")
            cells += [f"{ours:.0f}", *(["-", "-"] if peer is None else [f"{peer:.0f}", f"{peer / ours:.2f}"])]
        plain = row.get("plain_attention_us")
        cells.append("-" if plain is None else f"{row['attention_us'] / plain:.2f}")
        cells += [str(row["error"]), str(row["xla_error"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
