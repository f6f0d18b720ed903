"""Every crash point in the code is one at which some test kills."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("chunkstore", "manifest", "publisher", "subscriber", "deltasync")


def nodes(*folders: str) -> Iterator[ast.AST]:
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        yield from ast.walk(ast.parse(path.read_text(), str(path)))


def points_in_the_code() -> set[str]:
    found = set()
    for node in nodes(*PACKAGES):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "crash_point":
            (name,) = node.args
            assert isinstance(name, ast.Constant), f"line {node.lineno}: name a crash point in plain text"
            found.add(str(name.value))
    return found


def points_in_the_tests(points: set[str]) -> set[str]:
    """Whole names, with or without a count. A test that names one and does not reach it fails by itself."""
    texts = {node.value for node in nodes("tests") if isinstance(node, ast.Constant)}
    names = {re.sub(r":\d+$", "", text) for text in texts if isinstance(text, str)}
    return names & points


def test_there_is_a_test_for_every_crash_point() -> None:
    points = points_in_the_code()
    assert len(points) > 50
    assert points - points_in_the_tests(points) == set()
