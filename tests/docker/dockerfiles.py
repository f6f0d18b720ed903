"""A Dockerfile's instructions, as far as the tests look at them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    name: str  # upper case
    value: str  # with continued lines joined

    @property
    def words(self) -> list[str]:
        """Of an exec-form value, its words. Raises ValueError for a shell-form one."""
        text = self.value
        if self.name == "HEALTHCHECK":
            text = text.partition("CMD")[2].strip()
        words = json.loads(text)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{self.name} {self.value} is not in exec form")
        return words


def instructions(path: Path) -> list[Instruction]:
    """All instructions in order, without comments."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    parts = [line.strip().split(None, 1) for line in lines if line.strip()]
    return [Instruction(name.upper(), value) for name, value in parts]


def final_stage(path: Path) -> list[Instruction]:
    """The instructions of the last stage, its FROM first."""
    found = instructions(path)
    start = max(index for index, instruction in enumerate(found) if instruction.name == "FROM")
    return found[start:]


def copied_from_context(path: Path) -> list[str]:
    """Sources of every COPY from the build context."""
    sources = []
    for instruction in instructions(path):
        if instruction.name == "COPY" and "--from=" not in instruction.value:
            words = [word for word in instruction.value.split() if not word.startswith("--")]
            sources += words[:-1]
    return sources
