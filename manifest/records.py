"""Reading records that are msgpack on the wire: checked to be whole, of a known format, and in canonical form."""

from typing import Any, Protocol, TypeVar

import msgpack
from pydantic import ValidationError

from chunkstore.errors import FormatUnsupported
from manifest.errors import ManifestInvalid


class Record(Protocol):
    """A pydantic model that knows its wire form."""

    @property
    def data(self) -> bytes: ...

    @classmethod
    def model_validate(cls, obj: Any) -> Any: ...


R = TypeVar("R", bound=Record)


def read_record(model: type[R], data: bytes, *, name: str, version: int, hint: str) -> R:
    """`data` as a `model` whose `format` is `version`; `hint`: what to do about another one.

    Raises ManifestInvalid, FormatUnsupported; executes nothing.
    """
    try:
        raw = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ManifestInvalid(f"{name} is not msgpack: {error}") from error
    if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] != version:
        raise FormatUnsupported(f"{name} has format {raw['format']}, this release reads {version}", hint=hint)
    try:
        record: R = model.model_validate(raw)
    except ValidationError as error:
        raise ManifestInvalid(f"{name} does not match its schema: {error!s:.2000}") from error
    if record.data != data:
        raise ManifestInvalid(f"{name} is not in canonical form")
    return record
