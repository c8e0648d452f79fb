"""What is written for Kubernetes, against the schemas that its servers check by."""

from typing import Any

import pytest

from outpace.launch.kubernetes import KubernetesOptions, indexed_job, train_job
from outpace.records.cluster_job import ClusterJob

JOB = ClusterJob(
    name="try",
    nodes=4,
    ranks_per_node=8,
    gpus_per_node=8,
    cpus_per_rank=2,
    command=("train", "--model", "$(HOME) costs $5", "--out", "runs/try"),
    folder="/data",
)
WISHES = KubernetesOptions(
    image="registry.example/outpace:1", namespace="team", claim="shared-disk"
)


def kept(model: str, value: dict[str, Any]) -> None:
    """The schema knows every field: what it does not know, it drops."""
    models = pytest.importorskip("kubeflow_trainer_api.models")  # half a second of imports
    read = getattr(models, model).from_dict(value)
    assert read is not None and read.to_dict() == value


def test_a_trainjob_is_as_its_schema_says() -> None:
    (found,) = train_job(JOB, WISHES)
    kept("TrainerV1alpha1TrainJob", found)
    trainer = found["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "16"}
    assert found["metadata"] == {"name": "try", "namespace": "team"}


def test_an_indexed_job_and_its_service_are_as_their_schemas_say() -> None:
    service, job = indexed_job(JOB, WISHES)
    kept("IoK8sApiBatchV1Job", job)
    kept("IoK8sApiCoreV1Service", service)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    (container,) = pod["containers"]
    assert "--rdzv-endpoint=try-0.try:29500" in container["args"]


@pytest.mark.parametrize("write", [train_job, indexed_job])
def test_words_reach_outpace_as_they_were_typed(write: Any) -> None:
    spec = write(JOB, WISHES)[-1]["spec"]
    held = spec["trainer"] if "trainer" in spec else spec["template"]["spec"]["containers"][0]
    assert held["args"][-5:] == ["train", "--model", "$$(HOME) costs $$5", "--out", "runs/try"]
