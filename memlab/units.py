"""Bytes in print: MiB and GiB are powers of two."""

MiB = 2**20


def mib(nbytes: int | None) -> str:
    """Bytes as text in MiB, one decimal; an em dash for None."""
    return "—" if nbytes is None else f"{nbytes / MiB:,.1f} MiB"
