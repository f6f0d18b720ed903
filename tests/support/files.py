"""What is in a folder while others write and remove there."""

import os
from collections.abc import Iterator
from pathlib import Path


def below(folder: Path) -> Iterator[Path]:
    """All files and folders below `folder`. What goes away meanwhile is no error, unlike with `Path.rglob`."""
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in [*folders, *files])
