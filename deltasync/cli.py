"""The `deltasync` command.

Exit codes, the same for every command:

    0    done, and where a question was asked the answer is yes
    1    a DeltasyncError, printed as `error[kind]: message` and `hint:` on stderr; or the answer is no
         (`demo`: not bit-identical, `store verify`: damage found, `status --max-lag`: a subscriber is behind,
         `smoke`, `store check`: a step failed)
    2    the command line itself is wrong
    130  interrupted with Ctrl-C; a daemon that runs ends with 0, as with SIGTERM

Modules that take long to import (torch, boto3, transformers, rich, asyncio) are imported by the commands that need
them, when they run, so `deltasync --help` answers at once. The commands themselves are imported below `main`, where
Ctrl-C is caught.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, Final

from chunkstore.errors import ConfigError, DeltasyncError

FAILED: Final = 1
INTERRUPTED: Final = 130

_REQUIREMENT: Final = re.compile(r"([\w.-]+).*; extra == ['\"](\w+)['\"]")
"""Of a distribution's metadata: a library, and the extra that brings it."""


class _Parser(argparse.ArgumentParser):
    """Takes --debug. The parsers of its commands are of its class, so it may stand before or after a command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # No default: that of a command would replace what was given before the command.
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )


def build_parser() -> argparse.ArgumentParser:
    """Every command with its options; `args.run(args)` is the chosen command."""
    from importlib.metadata import version

    from deltasync.commands import (
        check_config,
        demo,
        keys_generate,
        publisher_run,
        smoke,
        status,
        store_check,
        store_compact,
        store_export,
        store_gc,
        store_show,
        store_verify,
        subscriber_run,
    )

    parser = _Parser(
        prog="deltasync",
        description="Keep RL rollout clusters bit-identical to their trainer by shipping only the changed weights.",
        epilog="Exit codes: 0 done or yes, 1 failed or no, 2 wrong command line, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"deltasync {version('deltasync')}")
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo.register(commands)
    publisher_run.register(commands)
    subscriber_run.register(commands)
    status.register(commands)
    store = commands.add_parser("store", help="look after a stream: check, show, verify, export, compact, gc")
    store_commands = store.add_subparsers(title="commands", metavar="COMMAND", required=True)
    store_check.register(store_commands)
    store_show.register(store_commands)
    store_verify.register(store_commands)
    store_export.register(store_commands)
    store_compact.register(store_commands)
    store_gc.register(store_commands)
    keys = commands.add_parser("keys", help="keys for signed streams: generate")
    keys_generate.register(keys.add_subparsers(title="commands", metavar="COMMAND", required=True))
    check_config.register(commands)
    smoke.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Exits the process only for --help and wrong usage."""
    debug = False
    try:
        args = build_parser().parse_args(argv)
        debug = args.debug
        code: int = args.run(args)
        sys.stdout.flush()
    except DeltasyncError as error:
        if debug:
            raise
        print(format_error(error), file=sys.stderr)
        return FAILED
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if debug or missing is None:
            raise
        print(format_error(missing), file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        if debug:
            raise
        return INTERRUPTED
    return code


def missing_extra(error: ModuleNotFoundError) -> ConfigError | None:
    """What to install where a command lacks a library of one of our extras; None if the module is none of theirs."""
    from importlib.metadata import requires

    name = (error.name or "").partition(".")[0]
    extras = sorted(
        found[2]
        for line in requires("deltasync") or ()
        if (found := _REQUIREMENT.match(line)) and found[1].replace("-", "_") == name and found[2] != "dev"
    )
    if not extras:
        return None
    return ConfigError(
        f"this command needs a package that is not installed: {name}",
        hint=f"install deltasync with its extra {' or '.join(map(repr, extras))}",
    )


def format_error(error: DeltasyncError) -> str:
    """`error[kind]: message`, and `hint: …` on the next line if there is one."""
    lines = [f"error[{error.kind}]: {error.message}"]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
