"""The manifests of deploy/kubernetes, and the commands of their containers as our own command line reads them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from text_generation_launcher import cli
from text_generation_launcher.config import LauncherConfig

REPOSITORY = Path(__file__).parents[1]
KUBERNETES = REPOSITORY / "deploy" / "kubernetes"
# What Kubernetes puts in the place of fields that are known in a cluster only.
FIELDS = {"status.podIP": "10.0.0.3"}

Manifest = dict[str, Any]


def manifests() -> list[Manifest]:
    return [each for path in sorted(KUBERNETES.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]


def found(kind: str, name: str) -> Manifest:
    [manifest] = [each for each in manifests() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return manifest


def pod(manifest: Manifest) -> Manifest:
    return dict(manifest["spec"]["template"]["spec"])


def container(manifest: Manifest) -> Manifest:
    [one] = pod(manifest)["containers"]
    return dict(one)


def words(one: Manifest) -> list[str]:
    """The command line of a container, with the variables that Kubernetes fills in. Without a command, the image's
    entry point starts the launcher."""
    values = {}
    for variable in one.get("env", ()):
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        values[variable["name"]] = variable.get("value", "") if field is None else FIELDS[field]
    text = [*one.get("command", ["text-generation-launcher"]), *one["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda variable: values[variable[1]], word) for word in text]


def launched(command: list[str]) -> LauncherConfig:
    """What text-generation-launcher reads from a command line. AssertionError with its answer if it refuses that."""
    configs: list[LauncherConfig] = []
    assert Path(command[0]).name == "text-generation-launcher"
    app = cli.command_line(lambda config: configs.append(config) or 0, {})
    result = CliRunner().invoke(app, command[1:])
    assert result.exit_code == 0 and configs, f"{' '.join(command)}: {result.output}"
    return configs[0]


def selected(selector: dict[str, str]) -> Iterator[str]:
    """Kinds and names of the sets of pods that have all labels of `selector`."""
    for each in manifests():
        if each["kind"] in ("Deployment", "StatefulSet"):
            labels = each["spec"]["template"]["metadata"]["labels"]
            if selector.items() <= labels.items():
                yield f"{each['kind']}/{each['metadata']['name']}"
