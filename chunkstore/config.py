"""Strict YAML configuration files: every wrong key or value is named, with its path and what is allowed."""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from chunkstore.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

M = TypeVar("M", bound=BaseModel)

_VARIABLE: Final = re.compile(r"\$\{([^}]*)\}")
_USERINFO: Final = re.compile(r"//[^/@\s]*@")  # a name and a password in a URL
_LABEL: Final = re.compile(r"[A-Za-z0-9_-]{1,63}")  # of a host name
_SHOWN: Final = 80  # characters of an offending value

_FORMS: Final = {
    "dict_type": "has to be keys and values",
    "list_type": "has to be a list",
    "tuple_type": "has to be a list",
    "too_short": "has to have at least one item",
}


class Section(BaseModel):
    """A part of a configuration: no other keys, and errors that leave out values, which may be secret."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def matching(pattern: str, words: str) -> AfterValidator:
    """For a string field: the whole of it has to match `pattern`; `words` is what people are told otherwise."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(words)
        return text

    return AfterValidator(check)


def _origin(text: str) -> str:
    parts = re.fullmatch(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?/?", text)
    if parts is None or not _is_host(parts[1]) or not 1 <= int(parts[2] or 1) <= 65535:
        raise ValueError("has to be http://host:port or https://host:port")
    return text


ORIGIN: Final = AfterValidator(_origin)
"""For a string field: a URL of a server as a whole, whose host and port there can be."""


def _is_host(host: str) -> bool:
    name = host.removesuffix(".")
    if not host.startswith("[") and not name.rpartition(".")[2].isdigit():  # no name ends in a number
        return len(name) < 254 and all(map(_LABEL.fullmatch, name.split(".")))
    try:
        return bool(IPv6Address(host[1:-1]) if host.startswith("[") else IPv4Address(host))
    except ValueError:
        return False


def load_config(path: str | os.PathLike[str], model: type[M]) -> M:
    """Read the YAML file at `path` as a `model`.

    `${NAME}` inside a string value becomes the environment variable NAME. Raises ConfigError: the file cannot be read,
    is not YAML, repeats a key, names an unset variable, or does not fit the model; the last lists every wrong key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {error}", hint="check the path of the config file"
        ) from error
    try:
        data = yaml.load(text, _StrictLoader)  # a SafeLoader: builds plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else f"{path}"
        raise ConfigError(f"{where}: {error.problem}", hint="correct the YAML at this place") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}", hint="correct the file") from error
    return parse_config({} if data is None else data, model, source=str(path))


def parse_config(data: object, model: type[M], *, source: str) -> M:
    """`data`, plain values as from YAML, as a `model`; otherwise like `load_config`. `source` begins the message."""
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{source}: is {_shown(data)}, but has to be keys and values",
            hint=f"allowed keys: {_listed(_keys({model}))}" if model.model_fields else "correct the file",
        )
    try:
        return model.model_validate(_substitute(data, "", source))
    except ValidationError as error:
        wrong = _explained(error.errors(), data, model)
        raise ConfigError(
            "\n  ".join([f"{source}: {len(wrong)} wrong {'key' if len(wrong) == 1 else 'keys'}", *wrong]),
            hint="correct the named keys",
        ) from None  # pydantic's own text shows values that may come from ${ENV}


def settings_of(config: M | Mapping[str, Any] | str | os.PathLike[str], model: type[M], *, source: str) -> M:
    """The configuration given as itself, a mapping, which `source` names, or the path of a YAML file.

    Raises ConfigError.
    """
    if isinstance(config, model):
        return config
    if isinstance(config, (str, os.PathLike)):
        return load_config(config, model)
    return parse_config(config, model, source=source)


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in seen:
                problem = "is given twice" if isinstance(key, str) else "is not a string"
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {_shown(key)} {problem}", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _substitute(value: object, path: str, source: str) -> object:
    """`value` with every `${NAME}` in its strings replaced; keys stay as they are."""

    def variable(match: re.Match[str]) -> str:
        name = match[1]
        if name not in os.environ:
            raise ConfigError(
                f"{source}: {path}: the environment variable {name!r} is not set",
                hint=f"set {name}, or write the value itself",
            )
        return os.environ[name]

    if isinstance(value, str):
        return _VARIABLE.sub(variable, value)
    if isinstance(value, Mapping):
        return {key: _substitute(item, f"{path}.{key}".lstrip("."), source) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_substitute(item, f"{path}[{index}]", source) for index, item in enumerate(value)]
    return value


def _explained(errors: "list[ErrorDetails]", data: object, model: type[BaseModel]) -> list[str]:
    """One line for each error that is not merely what another one leads to."""
    places = [error["loc"] for error in errors]

    def follows(error: "ErrorDetails") -> bool:
        here = error["loc"]
        inside = any(place[: len(here)] == here and len(place) > len(here) for place in places)
        return error["type"] == "default_factory_not_called" or (error["type"] == "too_short" and inside)

    listed: set[str] = set()
    return [_explain(error, data, model, listed) for error in errors if not follows(error)]


def _explain(error: "ErrorDetails", data: object, model: type[BaseModel], listed: set[str]) -> str:
    """One line: the path, the value as it was written, and what is allowed there.

    Values that may hold a secret are left out. `listed`: places whose allowed keys have been told.
    """
    kind, loc = error["type"], error["loc"]
    path, secret = "", False
    models = {model}
    for step, last in ((step, index == len(loc) - 1) for index, step in enumerate(loc)):
        if isinstance(step, int) and isinstance(data, (list, tuple)) and step < len(data):
            path += f"[{step}]"
            data = data[step]
        elif isinstance(data, Mapping) and (step in data or last):
            path = f"{path}.{step}".lstrip(".")
            data = data.get(step)
            if kind == "missing" and last:
                return f"{path}: is required"
            if kind == "extra_forbidden" and last:
                return _unknown(path, data, models, listed)
            fields = [field for one in models for field in _fields(one, step)]
            secret = _secret(fields)
            models = {found for field in fields for found in _models_in(field.annotation)}
        # Anything else is pydantic's own step, such as the tag of a union: it is no part of the file.
    if kind == "union_tag_invalid":
        path, data = f"{path}.{error['ctx']['discriminator'].strip(chr(39))}", error["ctx"]["tag"]
    return _said(path, data, _allowed(error, models), secret)


def _allowed(error: "ErrorDetails", models: set[type[BaseModel]]) -> str:
    """What is allowed there, in the words of the file instead of Python's."""
    kind, text = error["type"], error["msg"].removeprefix("Value error, ")
    if kind == "model_type":
        return f"has to be keys and values; allowed: {_listed(_keys(models))}"
    if kind == "union_tag_not_found":
        return f"which kind it is has to be said: {text.rpartition(' ')[2]} is required"
    if kind == "union_tag_invalid":
        return f"has to be one of {error['ctx']['expected_tags']}"
    lower = text[:1].lower() + text[1:] if text.startswith(("Input", "String", "Tuple", "List")) else text
    return _FORMS.get(kind, lower)


def _said(path: str, data: object, text: str, secret: bool) -> str:
    """Path, value and what is allowed, as far as there is a path, and a value that may be shown."""
    inner = data if isinstance(data, (list, tuple)) else (data,)
    hidden = secret or not path or any(isinstance(item, Mapping) for item in inner)
    return ": ".join(filter(None, [path, "" if hidden else _shown(data), text]))


def _unknown(path: str, data: object, models: set[type[BaseModel]], listed: set[str]) -> str:
    parent, _, key = path.rpartition(".")
    allowed = _keys(models)
    near = difflib.get_close_matches(key, allowed, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    rest = "" if parent in listed else f"{'' if near else ';'} allowed: {_listed(allowed)}"
    listed.add(parent)
    secret = _secret([field for one in models for name in near for field in _fields(one, name)])
    return _said(path, data, f"unknown key{meant}{rest}", secret)


def _keys(models: set[type[M]] | set[type[BaseModel]]) -> list[str]:
    return sorted({field.alias or name for one in models for name, field in one.model_fields.items()})


def _fields(model: type[BaseModel], key: object) -> list[FieldInfo]:
    """The field that `key` of the file is, if it is one."""
    return [field for name, field in model.model_fields.items() if key in (name, field.alias)]


def _secret(fields: list[FieldInfo]) -> bool:
    return any(found is SecretStr for field in fields for found in _within(field.annotation))


def _models_in(annotation: object) -> set[type[BaseModel]]:
    """Every model named anywhere in a type annotation."""
    return {
        found for found in _within(annotation) if isinstance(found, type) and issubclass(found, BaseModel)
    }


def _within(annotation: object) -> Iterator[object]:
    """A type annotation and everything it is made of."""
    yield annotation
    for argument in get_args(annotation):
        yield from _within(argument)


def _listed(keys: list[str]) -> str:
    return ", ".join(keys)


def _shown(value: object) -> str:
    text = _USERINFO.sub("//…@", repr(value))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
