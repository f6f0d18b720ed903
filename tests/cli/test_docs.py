"""The documentation's examples, tables and links are checked against the code."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

import deltasync
from chunkstore.http import HttpConfig
from chunkstore.metrics import StoreMetrics
from chunkstore.open import StoreConfig
from deltasync.cli import build_parser, main
from deltasync.demo.rows import PHASES
from manifest.key_files import SigningConfig, TrustConfig
from publisher.config import AnchorConfig, PublisherConfig, PublisherHttpConfig
from publisher.metrics import Metrics as PublisherMetrics
from subscriber.config import SGLangEngineConfig, SubscriberConfig, TorchEngineConfig
from subscriber.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
OPERATING = (ROOT / "docs" / "operating.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


YAMLS = blocks(README, "yaml")
PYTHONS = blocks(README, "python")


def test_there_is_a_yaml_example_for_each_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    for number, text in enumerate(YAMLS):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        assert main(["check-config", str(file)]) == 0
        seen.append(capsys.readouterr().out.split()[-2])
    assert seen == ["publisher's", "subscriber's"]


@pytest.mark.parametrize("text", PYTHONS)
def test_python_examples_use_names_and_arguments_that_exist(text: str) -> None:
    """Compiles each example, looks every `deltasync.…` up, and binds its calls to the real signatures."""
    tree = ast.parse(text)
    objects: dict[str, type] = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.targets[0], ast.Name)
        ):
            made = made_by(node.value)
            if made is not None:
                objects[node.targets[0].id] = made
    called = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = resolve(node.func, objects)
            if function is not None:
                bind(function, node)
                called += 1
    assert called >= 3


def made_by(call: ast.Call) -> type | None:
    """The public class that a call on `deltasync` makes an instance of."""
    names = dotted(call.func)
    if names[:1] != ["deltasync"]:
        return None
    found = getattr(deltasync, names[1])
    assert inspect.isclass(found)
    return found


def resolve(function: ast.expr, objects: dict[str, type]) -> object:
    """The function that an expression of an example names, or None if it is not ours."""
    first, *rest = dotted(function) or [""]
    found: object = deltasync if first == "deltasync" else objects.get(first)
    for name in rest if found is not None else []:
        found = getattr(found, name)
    return found


def bind(function: object, call: ast.Call) -> None:
    assert callable(function)
    signature = inspect.signature(function)
    takes_self = inspect.isfunction(function) and "." in function.__qualname__
    arguments = [object()] * (len(call.args) + takes_self)
    signature.bind(*arguments, **{str(k.arg): object() for k in call.keywords})


def dotted(expression: ast.expr) -> list[str]:
    """`a.b.c` as its parts; empty for anything else."""
    if isinstance(expression, ast.Name):
        return [expression.id]
    if isinstance(expression, ast.Attribute):
        before = dotted(expression.value)
        return [*before, expression.attr] if before else []
    return []


def test_the_trainer_example_has_ten_lines() -> None:
    assert len([line for line in PYTHONS[0].splitlines() if line.strip()]) <= 10


def test_every_public_name_loads() -> None:
    for name in deltasync.__all__:
        assert getattr(deltasync, name).__name__ == name
    assert set(deltasync.__all__) <= set(dir(deltasync))
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        getattr(deltasync, "Nonsense")  # noqa: B009 - mypy knows that it does not exist


@pytest.mark.parametrize(
    "line", [line for text in (README, OPERATING) for line in re.findall(r"`(deltasync [a-z][^`]*)`", text)]
)
def test_command_lines_in_the_text_are_valid(line: str) -> None:
    check_command(line)


@pytest.mark.parametrize(
    "line", [line for b in blocks(README, "sh") for line in b.splitlines() if line.startswith("deltasync")]
)
def test_command_lines_in_examples_are_valid(line: str) -> None:
    check_command(line)


EXAMPLES = {"V": "1", "N": "1"}
"""What placeholders for numbers stand for."""


def check_command(line: str) -> None:
    """Parses a documented command line; `[…]` marks what is optional. A bare command has to exist."""
    words = [EXAMPLES.get(word, word) for word in re.sub(r"[\[\]…]", " ", line.partition("#")[0]).split()[1:]]
    if all(re.fullmatch("[a-z-]+", word) and not word.startswith("-") for word in words):
        with pytest.raises(SystemExit, match="0"):
            build_parser().parse_args([*words, "--help"])
    else:
        build_parser().parse_args(words)


@pytest.mark.parametrize(
    ("heading", "model", "prefix"),
    [
        ("### `store`, in both files", StoreConfig, ""),
        ("### `publisher.yaml`", PublisherConfig, ""),
        ("### `publisher.yaml`", PublisherHttpConfig, "http."),
        ("### `subscriber.yaml`", SubscriberConfig, ""),
        ("### `subscriber.yaml`", HttpConfig, "http."),
        ("### `publisher.yaml`", SigningConfig, "signing."),
        ("### `publisher.yaml`", AnchorConfig, "anchors."),
        ("### `subscriber.yaml`", TrustConfig, "trust."),
        ("### `engine` of the torch kind", TorchEngineConfig, "engine."),
        ("### `engine` of the SGLang kind", SGLangEngineConfig, "engine."),
    ],
)
def test_every_config_key_is_documented_with_its_default(
    heading: str, model: type[BaseModel], prefix: str
) -> None:
    section = OPERATING.partition(heading)[2].partition("\n#")[0]
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \|([^|]*)\|", section, flags=re.MULTILINE))
    nested = {"anchors", "http", "signing", "trust"}
    documented = {k.removeprefix(prefix) for k in rows if k.startswith(prefix) and ("." in k) == bool(prefix)}
    assert documented == set(model.model_fields) - nested
    for name in documented:
        field, shown = model.model_fields[name], rows[prefix + name].strip()
        if field.is_required():
            assert shown == "required", name
        elif field.default is None:
            assert shown == "" or "<" in shown, name  # none, or one that depends on another key
        elif field.default_factory is None:
            assert yaml.safe_load(shown.strip("`")) == yaml.safe_load(str(field.default)), name


def test_every_metric_is_documented() -> None:
    store = StoreMetrics()
    text = (Metrics(store, lambda: (0, 0.0)).text() + PublisherMetrics(store).text()).decode()
    names = set(re.findall(r"^# HELP (\w+) ", text, flags=re.MULTILINE))
    exported = {name for name in names if not name.endswith("_created")}
    documented = set(re.findall(r"`(deltasync_\w+)`", OPERATING))
    assert documented == exported


def test_the_table_of_the_demo_is_explained() -> None:
    section = README.partition("## Reading the demo's table")[2].partition("\n## ")[0]
    for phase in PHASES:
        assert phase in section


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        other = (path.parent / file).resolve() if file else path
        assert other.exists(), target
        if anchor:
            assert anchor in anchors(other), target


def anchors(path: Path) -> set[str]:
    """The link targets of a document's headings, as they are made on common Git hosts."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
