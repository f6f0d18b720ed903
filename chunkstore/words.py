"""Numbers as people read them."""


def human_bytes(count: float) -> str:
    """12 B, 3.4 kB, 5.6 MB …: decimal units, as object stores bill them."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def counted(count: int, noun: str) -> str:
    """`1 version`, `2 versions`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")
