"""The Kubernetes example: fields that its kinds have, and names, numbers and ports that agree with each other."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).resolve().parents[3] / "docs/examples/kubernetes"

RESOURCES = {"limits": {"cpu": int, "memory": str}}
MOUNTS = [{"name": str, "mountPath": str}]
CONTAINER = {
    "name": str, "image": str, "command": [str], "args": [str], "resources": RESOURCES, "volumeMounts": MOUNTS,
    "securityContext": {"runAsUser": int}, "readinessProbe": {"tcpSocket": {"port": int}, "initialDelaySeconds": int},
}  # fmt: skip
VOLUME = {"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": str, "sizeLimit": str}}
POD = {"containers": [CONTAINER], "volumes": [VOLUME], "securityContext": {"fsGroup": int}}
REPLICA = {"replicas": int, "restartPolicy": {"Never", "OnFailure"}, "template": {"spec": POD}}
HEAD = {"apiVersion": str, "kind": str, "metadata": {"name": str}}
KINDS = {
    "v1 Namespace": HEAD,
    "v1 PersistentVolumeClaim": HEAD
    | {"spec": {"accessModes": [{"ReadWriteMany"}], "resources": {"requests": {"storage": str}}}},
    "kubeflow.org/v2beta1 MPIJob": HEAD
    | {
        "spec": {
            "slotsPerWorker": int,
            "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
            "sshAuthMountPath": str,
            "runPolicy": {"cleanPodPolicy": {"None", "Running", "All"}, "backoffLimit": int},
            "mpiReplicaSpecs": {"Launcher": REPLICA, "Worker": REPLICA},
        }
    },
}
"""Fields of each kind that the example uses, with their types, or values, after the schemas of Kubernetes and the MPI
operator."""


def problems(found, expected, where):
    """Differences from the fields of a kind."""
    match expected:
        case dict() if isinstance(found, dict):
            for name, value in found.items():
                if name in expected:
                    yield from problems(value, expected[name], f"{where}.{name}")
                else:
                    yield f"{where}.{name}: unknown field"
        case list() if isinstance(found, list):
            for number, value in enumerate(found):
                yield from problems(value, expected[0], f"{where}[{number}]")
        case set() if found in expected:
            return
        case type() if type(found) is expected:
            return
        case _:
            yield f"{where}: found {found!r}"


@pytest.fixture(scope="module")
def folder():
    """Objects of the folder by kind, and the kustomization."""
    top = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    objects = [yaml.safe_load((FOLDER / name).read_text()) for name in top["resources"]]
    return {each["kind"]: each for each in objects}, top


def test_fields(folder):
    assert len(folder[0]) == 3
    for kind, each in folder[0].items():
        assert not [*problems(each, KINDS[f"{each['apiVersion']} {kind}"], kind)]


def test_a_wrong_field_is_found():
    job = {"kind": "MPIJob", "spec": {"slotsPerWorker": "4", "mpiImplementation": "mpich", "sshPath": "x"}}
    found = [*problems(job, KINDS["kubeflow.org/v2beta1 MPIJob"], "job")]
    names = [text.partition(":")[0] for text in found]
    assert names == ["job.spec.slotsPerWorker", "job.spec.mpiImplementation", "job.spec.sshPath"]


def test_names_and_numbers_agree(folder):
    objects, top = folder
    spec = objects["MPIJob"]["spec"]
    replicas = spec["mpiReplicaSpecs"]
    (image,) = top["images"]
    assert top["namespace"] == objects["Namespace"]["metadata"]["name"]
    assert image["newTag"] == spec["mpiImplementation"].lower()
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == image["name"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        (claim,) = [volume[kind] for volume in pod["volumes"] for kind in volume if kind == "persistentVolumeClaim"]
        assert claim == {"claimName": objects["PersistentVolumeClaim"]["metadata"]["name"]}
    (command,) = replicas["Launcher"]["template"]["spec"]["containers"][0]["args"]
    ranks = int(re.search(r"mpiexec -n (\d+) ", command)[1])
    assert ranks == spec["slotsPerWorker"] * replicas["Worker"]["replicas"]


def test_the_image_fits_the_job(folder):
    image = (FOLDER / "Containerfile").read_text()
    spec = folder[0]["MPIJob"]["spec"]
    (worker,) = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    port = worker["readinessProbe"]["tcpSocket"]["port"]
    assert set(re.findall(r"Port (\d+)", image)) == {str(port)}
    assert f"--uid {worker['securityContext']['runAsUser']} mpiuser" in image
    assert f"HostKey {spec['sshAuthMountPath']}/id_rsa" in image
    assert (
        f"WORKDIR {Path(worker['command'][-1]).parent}\n" in image and f">{Path(worker['command'][-1]).name}\n" in image
    )
