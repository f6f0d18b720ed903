"""Named points at which a test can kill this process, to prove that a crash there loses nothing.

`DELTASYNC_CRASH_AT=publisher.before_manifest` sends SIGKILL to the process when it reaches that point;
`publisher.before_manifest:3` the third time. Unset, the cost is one comparison.
"""

import os
import signal

_target, _, _count = os.environ.get("DELTASYNC_CRASH_AT", "").partition(":")
_left = int(_count or 1)


def crash_point(name: str) -> None:
    """Die here, as if by kill −9, if the environment asks for it."""
    global _left
    if name != _target:
        return
    _left -= 1
    if _left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
