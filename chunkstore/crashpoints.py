"""Named points at which a test can kill this process, to prove that a crash there loses nothing.

`DELTASYNC_CRASH_AT=publisher.before_manifest` sends SIGKILL to the process when it reaches that point;
`publisher.before_manifest:3` the third time. The environment is read at each point, so that a process may be
told when it already runs.
"""

import os
import signal
from collections import Counter

_reached: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Die here, as if by kill −9, if the environment asks for it."""
    target, _, count = os.environ.get("DELTASYNC_CRASH_AT", "").partition(":")
    if name != target:
        return
    _reached[name] += 1
    if _reached[name] >= int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
