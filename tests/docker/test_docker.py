"""Dockerfiles and compose file: linted, consistent with each other, with the configs and with the command line.

No container engine is needed, so these checks run everywhere; they do not build an image.
"""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from chunkstore.config import load_config
from chunkstore.http import HttpConfig
from deltasync.cli import build_parser
from deltasync.commands.check_config import check_config
from publisher.config import PublisherConfig
from subscriber.config import SubscriberConfig
from tests.docker.compose import Compose, Service, load_compose
from tests.docker.dockerfiles import copied_from_context, final_stage, instructions

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
COMPOSE = load_compose(DOCKER / "compose.yaml")
PUBLISHER = load_config(DOCKER / "publisher.yaml", PublisherConfig)
SUBSCRIBER = load_config(DOCKER / "subscriber.yaml", SubscriberConfig)
OURS = {name: service for name, service in COMPOSE.services.items() if service.build is not None}


def by_name(path: Path) -> str:
    return path.name


def dockerfile_of(service: Service) -> Path:
    assert service.build is not None
    return (DOCKER / service.build.context / service.build.dockerfile).resolve()


def mounted(service: Service) -> Mapping[str, Path]:
    """Path in the container → file here, of every config mounted into the service."""
    return {mount.target: DOCKER / COMPOSE.configs[mount.source].file for mount in service.configs}


def test_there_are_the_images_we_promise() -> None:
    assert {path.name for path in DOCKERFILES} == {
        "Dockerfile.publisher",
        "Dockerfile.subscriber",
        "Dockerfile.trainer",
    }


@pytest.mark.parametrize("path", DOCKERFILES, ids=by_name)
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian:latest\nRUN cd / && sudo apt-get install x\n")
    hadolint = Path(sys.executable).with_name("hadolint")
    assert subprocess.run([hadolint, bad], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("path", DOCKERFILES, ids=by_name)
def test_images_are_slim_non_root_and_need_no_shell(path: Path) -> None:
    stages = [i for i in instructions(path) if i.name == "FROM"]
    assert len(stages) >= 2, "multi-stage: build tools stay behind"
    final = {i.name: i for i in final_stage(path)}
    assert re.fullmatch(r"python:3\.11-slim-[a-z]+", final["FROM"].value)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", final["USER"].value)
    assert final["ENTRYPOINT"].words
    assert final["CMD"].words
    assert "RUN" not in final


@pytest.mark.parametrize("path", DOCKERFILES, ids=by_name)
def test_health_is_asked_by_python(path: Path) -> None:
    check = {i.name: i for i in final_stage(path)}["HEALTHCHECK"]
    python, option, code = check.words
    assert (python, option) == ("python", "-c")
    compile(code, f"{path.name}: HEALTHCHECK", "exec")


@pytest.mark.parametrize("path", DOCKERFILES, ids=by_name)
def test_everything_copied_exists_and_reaches_the_builder(path: Path) -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in copied_from_context(path):
        assert (ROOT / source).exists(), source
        assert source in kept, f".dockerignore keeps {source} from the builder"


@pytest.mark.parametrize("path", DOCKERFILES, ids=by_name)
def test_images_hold_every_package_and_known_extras(path: Path) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= set(copied_from_context(path))
    extras = re.findall(r"\.\[([a-z0-9,]+)\]|EXTRAS=([a-z0-9,]+)", path.read_text())
    named = {extra for pair in extras for text in pair for extra in text.split(",") if extra}
    assert named
    assert named <= set(project["project"]["optional-dependencies"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=by_name)
def test_default_commands_are_valid(path: Path) -> None:
    final = {i.name: i for i in final_stage(path)}
    if final["ENTRYPOINT"].words == ["deltasync"]:
        build_parser().parse_args(final["CMD"].words)


def test_every_image_is_pinned() -> None:
    for name, service in COMPOSE.services.items():
        assert (service.image is None) != (service.build is None), name
        if service.image is not None:
            assert re.fullmatch(r"[a-z./-]+:[A-Za-z0-9.-]+", service.image), name
            assert not service.image.endswith(":latest"), name


def test_every_dockerfile_and_build_argument_exists() -> None:
    for service in OURS.values():
        assert service.build is not None
        path = dockerfile_of(service)
        assert path in DOCKERFILES
        assert (DOCKER / service.build.context).resolve() == ROOT
        arguments = {i.value.partition("=")[0] for i in instructions(path) if i.name == "ARG"}
        assert set(service.build.args) <= arguments


def test_names_are_declared_and_used() -> None:
    services = COMPOSE.services.values()
    assert {m.source for s in services for m in s.configs} == set(COMPOSE.configs)
    assert {v.partition(":")[0] for s in services for v in s.volumes} == set(COMPOSE.volumes)
    assert {n for s in services for n in s.networks} == set(COMPOSE.networks)
    assert all(bool(s.networks) != bool(s.network_mode) for s in services)
    for config in COMPOSE.configs.values():
        assert (DOCKER / config.file).is_file()


def test_dependencies_can_be_met() -> None:
    for name, service in COMPOSE.services.items():
        for other, dependency in service.depends_on.items():
            assert other in COMPOSE.services
            assert other != name
            if dependency.condition == "service_healthy":
                assert has_healthcheck(COMPOSE.services[other]), (
                    f"{name} waits for {other}, which has no check"
                )


def has_healthcheck(service: Service) -> bool:
    if service.healthcheck is not None:
        return True
    return service.build is not None and any(
        i.name == "HEALTHCHECK" for i in final_stage(dockerfile_of(service))
    )


def test_variables_have_defaults() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    assert re.findall(r"\$\{[^}]*\}", text)
    assert all(re.fullmatch(r"\$\{[A-Z_]+:-[^}]+\}", found) for found in re.findall(r"\$\{[^}]*\}", text))


@pytest.mark.parametrize("name", sorted(OURS))
def test_commands_use_what_is_mounted(name: str) -> None:
    service = OURS[name]
    final = {i.name: i for i in final_stage(dockerfile_of(service))}
    entrypoint = service.entrypoint or final["ENTRYPOINT"].words
    command = service.command or final["CMD"].words
    assert entrypoint[0] in ("deltasync", "python")
    if entrypoint[0] == "deltasync":
        build_parser().parse_args(command)
    files = mounted(service)
    copied = [i.value.split()[-1] for i in final_stage(dockerfile_of(service)) if i.name == "COPY"]
    for word in (*entrypoint, *command):
        if word.startswith("/"):
            assert word in files or word in copied, f"{name} names {word}, which nothing puts there"


@pytest.mark.parametrize("name", sorted(OURS))
def test_mounted_configs_are_valid(name: str) -> None:
    configs = [path for path in mounted(OURS[name]).values() if path.suffix == ".yaml"]
    assert configs
    for path in configs:
        check_config(path)


@pytest.mark.parametrize(("name", "config"), [("publisher", PUBLISHER), ("rollout", SUBSCRIBER)])
def test_who_opens_the_store_can_reach_it(name: str, config: PublisherConfig | SubscriberConfig) -> None:
    service = OURS[name]
    endpoint = urlsplit(config.store.endpoint_url or "")
    assert endpoint.hostname in COMPOSE.services
    server = COMPOSE.services[str(endpoint.hostname)]
    assert set(server.networks) & set(service.networks), f"{name} cannot reach {endpoint.hostname}"
    assert f"demo/{urlsplit(config.store.url).hostname}" in COMPOSE.services["bucket"].command
    user, password = (service.environment[f"AWS_{key}"] for key in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    assert (user, password) == (
        server.environment["MINIO_ROOT_USER"],
        server.environment["MINIO_ROOT_PASSWORD"],
    )
    assert "AWS_DEFAULT_REGION" in service.environment


def test_weights_travel_through_the_store_only() -> None:
    assert PUBLISHER.store == SUBSCRIBER.store
    assert OURS["trainer"].network_mode == "none"
    assert not set(OURS["publisher"].networks) & set(OURS["rollout"].networks)
    shared = {volume.partition(":")[0] for volume in OURS["trainer"].volumes} & {
        volume.partition(":")[0] for volume in OURS["rollout"].volumes
    }
    assert shared == {"models", "samples"}


def test_trainer_and_publisher_share_one_spool_in_memory_as_one_user() -> None:
    volume = COMPOSE.volumes["spool"]
    assert volume is not None
    users = set()
    for name in ("trainer", "publisher"):
        assert f"spool:{PUBLISHER.spool}" in OURS[name].volumes
        assert DOCKER / "publisher.yaml" in mounted(OURS[name]).values()
        final = {i.name: i for i in final_stage(dockerfile_of(OURS[name]))}
        users.add(final["USER"].value)
    (user,) = users
    uid, gid = user.split(":")
    assert f"uid={uid},gid={gid}," in volume.driver_opts.o


def test_the_publisher_sees_the_checkpoint_that_the_trainer_makes() -> None:
    assert PUBLISHER.base_checkpoint == Path("/models/smollm2")
    assert "models:/models" in OURS["trainer"].volumes
    assert "models:/models:ro" in OURS["publisher"].volumes


@pytest.mark.parametrize(
    ("http", "image", "service"),
    [(SUBSCRIBER.http, "subscriber", "rollout"), (PUBLISHER.http, "publisher", "publisher")],
)
def test_each_daemon_listens_where_it_is_asked(http: HttpConfig, image: str, service: str) -> None:
    final = final_stage(DOCKER / f"Dockerfile.{image}")
    (port,) = [i.value for i in final if i.name == "EXPOSE"]
    assert port == str(http.port)
    assert http.host == "0.0.0.0"
    (check,) = [i for i in final if i.name == "HEALTHCHECK"]
    assert f"http://127.0.0.1:{port}/healthz" in check.words[-1]
    assert OURS[service].ports == [f"127.0.0.1:{port}:{port}"]


def test_a_wrong_compose_file_is_refused() -> None:
    raw = COMPOSE.model_dump()
    raw["services"]["trainer"]["comand"] = ["x"]
    with pytest.raises(ValueError, match="comand"):
        Compose.model_validate(raw)
