"""How checks that go step by step are shown: a line each as they are done, or one JSON document."""

from dataclasses import asdict

from chunkstore.steps import Step, Steps
from chunkstore.words import counted
from deltasync.commands._common import print_json

_WORDS = {"ok": "ok", "failed": "FAILED", "skipped": "skipped"}


class Telling:
    """Shows what becomes of `steps`; `end` comes last."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._done: list[Step] = []
        self.steps = Steps(self._tell)

    def end(self, well: str, next_: str = "") -> int:
        """Say how it went, `well` if so, and what comes next; the exit code."""
        failed = sum(step.outcome == "failed" for step in self._done)
        if self._json:
            print_json({"ok": self.steps.ok, "steps": [asdict(step) for step in self._done]})
        else:
            print(well if self.steps.ok else f"{counted(failed, 'step')} failed")
            if next_:
                print(f"next: {next_}")
        return 0 if self.steps.ok else 1

    def _tell(self, step: Step) -> None:
        self._done.append(step)
        if not self._json:
            print("\n".join(_lines(step)), flush=True)


def _lines(step: Step) -> list[str]:
    where = step.name if step.server is None else f"{step.server}: {step.name}"
    lines = [f"{_WORDS[step.outcome]:8}{where}: {step.detail}"]
    if step.outcome == "ok":
        lines[0] += f" ({step.seconds:.2f} s)"
    if step.outcome == "failed":
        lines[0] = f"{_WORDS[step.outcome]:8}{where}: error[{step.kind}]: {step.detail}"
    if step.hint:
        lines.append(f"{'':8}hint: {step.hint}")
    return lines
