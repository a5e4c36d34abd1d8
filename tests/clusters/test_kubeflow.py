"""Kubeflow's resources in deploy/kubernetes, as Kubeflow's own packages read them: they know every field."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from kubeflow.training import models as training
from kubeflow_trainer_api import models as trainer
from kubernetes.client import ApiClient

MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def _is_in(part: Any, whole: Any) -> bool:
    """Whether nothing of ``part`` is missing; what is added are defaults."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(name in whole and _is_in(part[name], whole[name]) for name in part)
    if isinstance(part, list):
        return isinstance(whole, list) and len(part) == len(whole) and all(map(_is_in, part, whole))
    return bool(part == whole)


def _read_by_trainer(document: dict[str, Any]) -> Any:
    kind = getattr(trainer, f"TrainerV1alpha1{document['kind']}")
    return kind.from_dict(document).to_dict()


def _read_by_training_operator(document: dict[str, Any]) -> Any:
    client = ApiClient()
    client.NATIVE_TYPES_MAPPING = {**client.NATIVE_TYPES_MAPPING, **vars(training)}  # where it looks for types
    read = client.deserialize(SimpleNamespace(data=json.dumps(document)), training.KubeflowOrgV1PyTorchJob)
    return client.sanitize_for_serialization(read)


@pytest.mark.parametrize("index", [0, 1])
def test_train_job(index: int) -> None:
    document = _documents("trainjob.yaml")[index]
    assert _is_in(document, _read_by_trainer(document))
    document["spec"]["typo"] = 1
    assert not _is_in(document, _read_by_trainer(document))


def test_pytorch_job() -> None:
    (document,) = _documents("pytorchjob.yaml")
    assert _is_in(document, _read_by_training_operator(document))
    document["spec"]["pytorchReplicaSpecs"]["Master"]["typo"] = 1
    assert not _is_in(document, _read_by_training_operator(document))
