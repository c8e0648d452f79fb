"""Manifests for Kubernetes: a TrainJob of Kubeflow, or an Indexed Job with its Service.

A TrainJob is of trainer.kubeflow.org/v1alpha1 (Kubeflow Trainer 2), an Indexed Job of batch/v1. The
pods of the latter get host names from a headless Service, for torchrun's rendezvous (kubernetes.io,
"Job with Pod-to-Pod Communication").
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.records.cluster_job import ClusterJob

_PORT = 29500
_SHM = "shm"
_NODE = "node"  # name of the replicated job and its container in Kubeflow's runtimes
_MANAGER = "outpace/launch"
_BACKOFF = 6  # restarts of all pods before the job fails
_SAVE_S = 120  # seconds from SIGTERM to SIGKILL
_APART_S = 900  # time between the starts of two nodes, one of which may have to pull the image
_STARTED = (f"--shutdown-timeout={_SAVE_S}", "-m", "outpace")
_DISTURBED = {"type": "DisruptionTarget", "status": "True"}


@dataclass(frozen=True)
class KubernetesOptions:
    """Options for Kubernetes; `claim` names the volume claim to mount at the job's folder."""

    image: str
    runtime: str = "torch-distributed"
    namespace: str | None = None
    claim: str | None = None


def train_job(job: ClusterJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return a TrainJob; its runtime's torch plugin sets torchrun's variables on every node."""
    trainer: dict[str, Any] = {
        "image": options.image,
        # A TrainJob cannot set a working directory, so the command changes to it.
        "command": ["sh", "-c", 'cd "$$0" && exec torchrun "$$@"', *_escape((str(job.folder),))],
        "args": [*_STARTED, *_escape(job.command)],
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks_per_node,
    }
    resources = _pod_resources(job)
    if resources:
        trainer["resourcesPerNode"] = resources
    spec: dict[str, Any] = {"runtimeRef": {"name": options.runtime}, "trainer": trainer}
    volumes, mounts = _volumes_and_mounts(job, options)
    pod = {"terminationGracePeriodSeconds": _SAVE_S + 10, "volumes": volumes,
           "containers": [{"name": _NODE, "volumeMounts": mounts}]}  # fmt: skip
    node = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [node]}}}
    spec["runtimePatches"] = [{"manager": _MANAGER, "trainingRuntimeSpec": patch}]
    return [_make_manifest("trainer.kubeflow.org/v1alpha1", "TrainJob", job, options, spec)]


def indexed_job(job: ClusterJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return a headless Service and an Indexed Job with one pod per node."""
    service = {"clusterIP": "None", "selector": {"job-name": job.name},
               "publishNotReadyAddresses": True}  # fmt: skip
    volumes, mounts = _volumes_and_mounts(job, options)
    container: dict[str, Any] = {
        "name": _NODE,
        "image": options.image,
        "workingDir": str(job.folder),
        "command": ["torchrun"],
        "args": [
            f"--nnodes={job.nodes}", f"--nproc-per-node={job.ranks_per_node}",
            "--rdzv-backend=c10d", f"--rdzv-id=job-{job.name}",
            f"--rdzv-endpoint={job.name}-0.{job.name}:{_PORT}",
            f"--rdzv-conf=read_timeout={_APART_S},join_timeout={_APART_S}",
            *_STARTED, *_escape(job.command),
        ],
        "volumeMounts": mounts,
    }  # fmt: skip
    resources = _pod_resources(job)
    if resources:
        container["resources"] = resources
    pod = {"subdomain": job.name, "restartPolicy": "Never",
           "terminationGracePeriodSeconds": _SAVE_S + 10,
           "containers": [container], "volumes": volumes}  # fmt: skip
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": _BACKOFF * job.nodes,  # counts pods, and a lost pod ends all others
        # Evicted pods do not count, but pods that fail because they lost a peer do.
        "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [_DISTURBED]}]},
        "template": {"spec": pod},
    }
    return [
        _make_manifest("v1", "Service", job, options, service),
        _make_manifest("batch/v1", "Job", job, options, spec),
    ]


def _make_manifest(
    version: str, kind: str, job: ClusterJob, options: KubernetesOptions, spec: Mapping[str, Any]
) -> dict[str, Any]:
    metadata = {"name": job.name}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": dict(spec)}


def _pod_resources(job: ClusterJob) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if job.gpus_per_node:
        asked["nvidia.com/gpu"] = str(job.gpus_per_node)
    if job.cpus_per_rank is not None:
        asked["cpu"] = str(job.cpus_per_rank * job.ranks_per_node)
    return {"requests": asked, "limits": dict(asked)} if asked else {}


def _volumes_and_mounts(
    job: ClusterJob, options: KubernetesOptions
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    # Containers have 64 MiB of shared memory by default, and data workers and NCCL need more.
    volumes: list[dict[str, Any]] = [{"name": _SHM, "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": _SHM, "mountPath": "/dev/shm"}]
    if options.claim is not None:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}})
        mounts.append({"name": "shared", "mountPath": str(job.folder)})
    return volumes, mounts


def _escape(words: tuple[str, ...]) -> list[str]:
    """Escape text for Kubernetes, which expands $(NAME) and reads $$ as a dollar sign."""
    return [word.replace("$", "$$") for word in words]
