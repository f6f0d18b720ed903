"""Ordered, lazy listing of a tree of directories in the order an object store lists keys."""

from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

from chunkstore.store import ObjectInfo, check_prefix, is_key


class Entry(NamedTuple):
    """One name in a directory. `info` reads the record of a file, or returns None if the file is gone by now."""

    name: str
    is_directory: bool
    info: Callable[[], ObjectInfo | None]


def walk(entries: Callable[[str], Iterable[Entry]], prefix: str, after: str) -> Iterator[ObjectInfo]:
    """Files whose key starts with `prefix` and is greater than `after`, ascending by full key.

    `entries(directory)` lists one directory, given as "" or "a/b/", in any order; a missing one is empty. One directory
    is read at a time, and only those that can hold a wanted key. Names that are not keys, temporaries among them, are
    left out. Raises InvalidKey for a prefix that no key can have.
    """
    check_prefix(prefix)
    yield from _walk(entries, prefix[: prefix.rfind("/") + 1], prefix, after)


def _walk(
    entries: Callable[[str], Iterable[Entry]], directory: str, prefix: str, after: str
) -> Iterator[ObjectInfo]:
    # A directory sorts as its name with the slash: "a.b" < "a/x" < "ab", because "." < "/" < "b".
    named = {
        f"{directory}{entry.name}/" if entry.is_directory else directory + entry.name: entry
        for entry in entries(directory)
        if is_key(entry.name)
    }
    for path, entry in sorted(named.items(), key=itemgetter(0)):
        if entry.is_directory:
            overlaps = path.startswith(prefix) or prefix.startswith(path)
            if overlaps and (path > after or after.startswith(path)):
                yield from _walk(entries, path, prefix, after)
        elif path.startswith(prefix) and path > after and is_key(path):
            info = entry.info()
            if info is not None:
                yield info
