"""The manifests in deploy/kubernetes: valid for Kubernetes, and in agreement with farprop's settings.

The parts of Kubeflow's resources around their pods are checked by Kubeflow's own packages in `make clusters`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from farprop.config import Settings
from farprop.errors import UsageError
from farprop.rpc.launchers import Launched, launched
from farprop.runtime.secret import find_secret

MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"
SECRET = "5f2e0123456789abcdef0123456789abcdef77"
CUSTOM = {"TrainingRuntime", "TrainJob", "PyTorchJob"}


def documents(kind: str = "") -> dict[str, Any]:
    """The resources in all manifests, or those of one kind, by file and kind."""
    return {
        f"{path.name}:{document['kind']}": document
        for path in sorted(MANIFESTS.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
        if kind in ("", document["kind"])
    }


def _pod_templates(part: Any) -> Iterator[dict[str, Any]]:
    """What has containers, anywhere in a resource."""
    if isinstance(part, dict):
        if "containers" in part.get("spec", {}):
            yield part
        for inner in part.values():
            yield from _pod_templates(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from _pod_templates(inner)


PODS = {
    f"{name}:{index}": template
    for name, document in documents().items()
    for index, template in enumerate(_pod_templates(document))
}


def test_there_are_a_stateful_set_and_both_jobs_of_kubeflow() -> None:
    assert {name.partition(":")[2] for name in documents()} == CUSTOM | {"Service", "StatefulSet", "NetworkPolicy"}
    assert len(PODS) == 4  # a PyTorchJob has two


@pytest.mark.parametrize("name", documents())
def test_resources_are_valid(name: str) -> None:
    document = documents()[name]
    if document["kind"] not in CUSTOM:
        kubernetes_validate.validate(document, "1.37", strict=True)


@pytest.mark.parametrize("name", PODS)
def test_pods_are_valid(name: str) -> None:
    whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": PODS[name]}
    kubernetes_validate.validate(whole, "1.37", strict=True)
    PODS[name]["spec"]["containers"][0]["comand"] = []  # the validator finds what is misspelt
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(whole, "1.37", strict=True)
    del PODS[name]["spec"]["containers"][0]["comand"]


def _environment(template: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in template["spec"]["containers"][0].get("env", [])}


@pytest.mark.parametrize("name", PODS)
def test_pods_agree_with_the_settings(name: str) -> None:
    spec = PODS[name]["spec"]
    (container,) = spec["containers"]
    env = _environment(PODS[name])
    unknown = {text for text in env if text.startswith("FARPROP_")} - _known_settings()
    assert not unknown
    settings = Settings.from_env(env)
    # The ports that workers may take are named, and nothing else is but the store's.
    assert settings.port_range is not None
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    first, last = settings.port_range
    workers = set(range(first, last + 1))
    assert workers <= set(ports.values())
    assert {number for number in ports.values() if number not in workers} <= {29500}
    if probe := container.get("readinessProbe"):
        assert ports[probe["tcpSocket"]["port"]] == first  # the first worker of a pod takes it
    # The secret's path is in a volume that only the pod's own group can read.
    assert settings.secret_file is not None
    (mount,) = container["volumeMounts"]
    (volume,) = spec["volumes"]
    assert settings.secret_file == f"{mount['mountPath']}/secret"  # the key that the command in the manifest makes
    assert mount["name"] == volume["name"]
    assert volume["secret"]["defaultMode"] == 0o400
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]


def _known_settings() -> set[str]:
    source = Path(Settings.from_env.__code__.co_filename).read_text()
    fixed = {"FARPROP_TLS_CERT", "FARPROP_TLS_KEY", "FARPROP_TLS_CA"}
    return set(re.findall(r'"(FARPROP_[A-Z_]+)"', source)) | fixed


def test_workers_of_the_stateful_set_find_each_other() -> None:
    (stateful,) = documents("StatefulSet").values()
    (service,) = documents("Service").values()
    (policy,) = documents("NetworkPolicy").values()
    spec = stateful["spec"]
    env = _environment(spec["template"])
    name, serviced = stateful["metadata"]["name"], spec["serviceName"]
    assert serviced == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    labels = spec["template"]["metadata"]["labels"]
    selectors = (
        spec["selector"]["matchLabels"],
        service["spec"]["selector"],
        policy["spec"]["podSelector"]["matchLabels"],
    )
    assert all(selector == labels for selector in selectors)
    last = spec["replicas"] - 1
    found = launched({**env, "RANK": str(last)})
    assert found == Launched("the environment", last, spec["replicas"], f"{name}-0.{serviced}", 29500)
    ports = {port["name"]: port["containerPort"] for port in spec["template"]["spec"]["containers"][0]["ports"]}
    assert ports["store"] == found.port
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
    (rule,) = policy["spec"]["ingress"]
    store, workers = rule["ports"]
    assert store["port"] == "store"
    assert (workers["port"], workers["endPort"]) == Settings.from_env(env).port_range


def test_master_port_of_the_pytorch_job() -> None:
    for name, template in PODS.items():
        if "PyTorchJob" in name:  # the operator looks for these two names
            (container,) = template["spec"]["containers"]
            assert container["name"] == "pytorch"
            assert [port["containerPort"] for port in container["ports"] if port["name"] == "pytorchjob-port"] == [
                29500
            ]


def test_a_node_of_the_train_job_has_two_ports_for_each_worker() -> None:
    (runtime,) = documents("TrainingRuntime").values()
    (job,) = documents("TrainJob").values()
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (template,) = _pod_templates(runtime)
    first, last = Settings.from_env(_environment(template)).port_range or (0, 0)
    assert last - first + 1 == 2 * job["spec"]["trainer"]["numProcPerNode"]


def _mount(directory: Path, mode: int) -> str:
    """A secret as Kubernetes mounts it: links to a directory that is replaced when the secret changes."""
    data = directory / "..2026_11_18"
    data.mkdir()
    file = data / "secret"
    file.write_text(SECRET)
    file.chmod(mode)
    (directory / "..data").symlink_to(data.name)
    (directory / "secret").symlink_to("..data/secret")
    return str(directory / "secret")


def _key(path: str) -> bytes:
    return find_secret(Settings(secret_file=path), "job", lambda _, value: value).key


@pytest.mark.skipif(os.getuid() != 0, reason="the files of a mounted secret belong to root")
@pytest.mark.parametrize(("mode", "user"), [(0o400, 0), (0o440, 0), (0o440, 1000)])
def test_mounted_secret_can_be_read(mode: int, user: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _mount(tmp_path, mode)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert _key(path) == find_secret(Settings(secret=SECRET), "job", lambda _, value: value).key


@pytest.mark.parametrize("mode", [0o644, 0o444, 0o460, 0o404])
def test_secret_that_others_can_read_or_a_group_can_write_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="defaultMode: 0400"):
        _key(_mount(tmp_path, mode))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_only_root_may_let_a_group_read_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _mount(tmp_path, 0o440)
    os.chown(path, 1000, 1000)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="can be read by others"):
        _key(path)
