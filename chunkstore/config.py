"""Strict YAML configuration files: every wrong key or value is named, with its path and what is allowed."""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from chunkstore.errors import ConfigError

M = TypeVar("M", bound=BaseModel)

_VARIABLE: Final = re.compile(r"\$\{([^}]*)\}")
_SHOWN: Final = 80  # characters of an offending value


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
            hint=f"allowed keys: {_listed(_keys({model}))}",
        )
    try:
        return model.model_validate(_substitute(data, "", source))
    except ValidationError as error:
        wrong = [_explain(item["type"], item["loc"], item["msg"], data, model) for item in error.errors()]
        raise ConfigError(
            "\n  ".join([f"{source}: {len(wrong)} wrong {'key' if len(wrong) == 1 else 'keys'}", *wrong]),
            hint="correct the named keys",
        ) from None  # pydantic's own text shows values that may come from ${ENV}


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


def _explain(kind: str, loc: tuple[int | str, ...], text: str, data: object, model: type[BaseModel]) -> str:
    """One line: the path, the value as it was written, and what is allowed there."""
    path = ""
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
                return f"{path}: {_shown(data)}: {_unknown(str(step), _keys(models))}"
            models = {
                found
                for one in models
                for name, field in one.model_fields.items()
                if step in (name, field.alias)
                for found in _models_in(field.annotation)
            }
        # Anything else is pydantic's own step, such as the tag of a union: it is no part of the file.
    text = text.removeprefix("Value error, ")
    if kind == "union_tag_not_found":
        return (
            f"{path}: {_shown(data)}: which kind it is has to be said: {text.rpartition(' ')[2]} is required"
        )
    allowed = text[:1].lower() + text[1:] if text.startswith("Input") else text
    return f"{path}: {_shown(data)}: {allowed}" if path else allowed


def _unknown(key: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(key, allowed, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown key; {meant}allowed: {_listed(allowed)}"


def _keys(models: set[type[M]] | set[type[BaseModel]]) -> list[str]:
    return sorted({field.alias or name for one in models for name, field in one.model_fields.items()})


def _models_in(annotation: object) -> set[type[BaseModel]]:
    """Every model named anywhere in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {found for argument in get_args(annotation) for found in _models_in(argument)}


def _listed(keys: list[str]) -> str:
    return ", ".join(keys)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
