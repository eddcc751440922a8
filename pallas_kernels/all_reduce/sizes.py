"""In how many shots devices sum."""

# Of two H200, by NVLink, in one shot: 256 rows of 4,096 take 5.2 us more than one (mesh-sums-words).
LINK_BYTES_A_US = 400_000
WAIT_US = 2.5


def default_shots(rows: int, width: int, devices: int) -> int:
    """1, or 2 where what is not sent takes longer than the second wait: of two devices never.

    Reckoned by what two GPUs took, not measured on more.

    Args:
        rows: Of 16-bit numbers.
        width: Of a row.
        devices: That sum.
    """
    of_rows = 2 * rows * width
    in_one, in_two = of_rows * (devices - 1), 2 * of_rows * (devices - 1) / devices
    return 2 if in_one - in_two > WAIT_US * LINK_BYTES_A_US else 1
