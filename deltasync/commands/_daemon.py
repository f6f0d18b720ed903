"""What the two daemons share: the log's form, and loading what a config names as `module:function`."""

import ctypes
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from chunkstore.errors import ConfigError, DeltasyncError

_M_MMAP_THRESHOLD: Final = -3  # malloc.h


def return_freed_memory() -> None:
    """Let malloc return blocks of a MiB and more to the system as soon as they are freed; for processes of our own.

    By default glibc keeps them, and between chunks that end out of order it keeps a few hundred MiB of holes. Elsewhere
    nothing happens.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def log_to_stderr(level: str) -> None:
    """One line per record on stderr: UTC time with milliseconds, level, logger, message. `level`: debug, info …"""
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level != "debug":
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for every request


@contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Turn whatever the user's own code in the block raises into a ConfigError that begins with `what`."""
    try:
        yield
    except DeltasyncError:
        raise
    except Exception as error:  # the code is not ours, so it may raise anything
        raise ConfigError(
            f"{what} raised {type(error).__name__}: {error}",
            hint="this comes from your own code; `deltasync --debug …` shows where",
        ) from error


def load_function(name: str, key: str) -> Callable[..., Any]:
    """The function `module:function`, which config key `key` names. Raises ConfigError if there is none.

    The working directory is searched last, so that it cannot shadow an installed package.
    """
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with user_errors(f"{key}: importing {module_name!r}"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{key}: {name!r}: module {error.name!r} cannot be imported",
                hint="install it, put its folder into PYTHONPATH, or start from its folder",
            ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(
            f"{key}: {name!r}: {module_name} ({module.__file__}) has no function {attribute!r}",
            hint="name a function of that module",
        )
    function: Callable[..., Any] = found
    return function
