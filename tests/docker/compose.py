"""The part of the Compose file format that docker/compose.yaml uses, strictly: any other key is an error."""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

Duration = Annotated[str, Field(pattern=r"^(\d+(ms|s|m|h))+$")]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Build(_Strict):
    context: str
    dockerfile: str
    args: dict[str, str] = {}


class Healthcheck(_Strict):
    """Exec form only: what a container without a shell can run."""

    test: Annotated[list[str], Field(min_length=2)]
    interval: Duration
    timeout: Duration
    retries: Annotated[int, Field(ge=1)]
    start_period: Duration = "0s"


class DependsOn(_Strict):
    condition: Literal["service_started", "service_healthy", "service_completed_successfully"]


class ConfigMount(_Strict):
    source: Name
    target: Annotated[str, Field(pattern=r"^/")]


class Service(_Strict):
    image: str | None = None
    build: Build | None = None
    entrypoint: list[str] = []
    command: list[str] = []
    environment: dict[str, str] = {}
    configs: list[ConfigMount] = []
    volumes: list[str] = []
    ports: list[str] = []
    networks: list[Name] = []
    network_mode: Literal["none"] | None = None
    depends_on: dict[Name, DependsOn] = {}
    healthcheck: Healthcheck | None = None


class ConfigFile(_Strict):
    file: str


class TmpfsOptions(_Strict):
    type: Literal["tmpfs"]
    device: Literal["tmpfs"]
    o: str


class Volume(_Strict):
    driver_opts: TmpfsOptions


class Compose(_Strict):
    name: Name
    services: dict[Name, Service]
    configs: dict[Name, ConfigFile]
    networks: dict[Name, None]
    volumes: dict[Name, Volume | None]


def load_compose(path: Path) -> Compose:
    """Parse the file; `x-` extension fields are dropped, as Compose does."""
    raw = yaml.safe_load(path.read_text())
    return Compose.model_validate({key: value for key, value in raw.items() if not key.startswith("x-")})
