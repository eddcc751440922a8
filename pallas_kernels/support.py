"""Which requests a kernel serves. Code, tests and `jattn doctor` ask the same question here."""


def why_not(*, platform: str) -> str | None:
    """Why the Mosaic GPU kernels cannot serve attention on this platform; None if they can."""
    return f"there are no mosaic_gpu kernels yet (platform {platform!r})"
