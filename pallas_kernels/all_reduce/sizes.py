"""In how many shots devices sum."""

# Two H100, a process each (mesh-two-shots), bf16 rows of 4,096: 256 take 9.7 us in one shot and 10.4 in two,
# 1,024 take 34.3 and 32.1, with the norm 38.1 and 31.5, 2,048 75.6 and 64.6, 86.6 and 67.6. They send as many
# bytes, but in one shot both add all of the rows.
BYTES_OF_TWO = 1 << 22
# More than two devices send fewer in two shots. Reckoned: bytes take the time of NVLink's 450 GB/s, the
# second wait up to 1 us. Four H100 (mesh-four) agree: 256 rows take 28.5 us in one shot and 13.8 in two, 64
# with the norm 13.4 and 9.9; of 8, and of one, it is the host that takes longest.
LINK_BYTES_A_US, WAIT_US = 450_000, 1


def default_shots(rows: int, width: int, devices: int) -> int:
    """1 for few rows, else 2.

    Args:
        rows: Of 16-bit numbers.
        width: Of a row.
        devices: That sum.
    """
    of_rows = 2 * rows * width
    in_one, in_two = (bytes_sent(of_rows, devices, shots) for shots in (1, 2))
    return 2 if of_rows > BYTES_OF_TWO or in_one - in_two > WAIT_US * LINK_BYTES_A_US else 1


def bytes_sent(of_rows: int, devices: int, shots: int) -> float:
    """By each device, of rows of so many bytes."""
    return of_rows * (devices - 1) * (1.0 if shots == 1 else 2 / devices)
