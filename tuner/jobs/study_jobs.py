"""Kubernetes manifests of a study's workers: pods that run `tgi-tune worker` with one shared storage."""

from tuner.config import TuneConfig
from tuner.errors import SpaceError
from tuner.jobs.job_manifest import FOLDER, JobManifest, SecretVariable
from tuner.jobs.yaml_text import yaml_text
from tuner.servers.exported_text import image_note
from tuner.study.shared_storage.foreign_config import ALLOW, local_parts
from tuner.study.shared_storage.token import TOKEN_VARIABLE

WORKER, STORAGE_SECRET = "tgi-tune-worker", "tgi-tune-storage"
PROXY = "grpc://"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]", "0.0.0.0")
# A restarted pod continues the search; the trial of the lost worker is enqueued again.
RETRIES = 6


def study_jobs(name: str, config: TuneConfig, storage: str, workers: int, image: str) -> dict[str, str]:
    """The files of a kustomization, by name. Raises SpaceError for a storage or a server that pods cannot use."""
    _check(config, storage)
    local = local_parts(config)
    worker = JobManifest(
        WORKER,
        image,
        ("tgi-tune", "worker", "--study", name, "--storage", storage, *([ALLOW] if local else [])),
        pods=workers,
        retries=RETRIES,
        variables=(SecretVariable(TOKEN_VARIABLE, STORAGE_SECRET),),
        gpus=len(config.server.gpus),
        apart_from=(WORKER,),
    )
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["workers.yaml"],
    }
    server = config.server.profile or config.server.kind
    comments = (
        f"{workers} workers of study {name} on {storage}. Before the first run, with the proxy's token:",
        f"  kubectl create secret generic {STORAGE_SECRET} --from-literal={TOKEN_VARIABLE}=TOKEN",
        f"Then, while `tgi-tune run --study {name}` is running: kubectl apply -k .",
        *image_note(image),
        *(f"Assumes that the image contains {key} = {value}." for key, value in local.items()),
        f"Assumes that {image} has tgi-tune and the study's server ({server}) on PATH, and that user 1000 can write to "
        f"{FOLDER}.",
        f"Assumes that pods reach {storage}. The traffic is not encrypted: use a private network.",
        "Each worker runs on its own node. Device class and server build must equal those of the study, unless the "
        "study sets `mixed = true`.",
    )
    return {
        "kustomization.yaml": yaml_text(kustomization, comments),
        "workers.yaml": yaml_text(worker.content()),
    }


def _check(config: TuneConfig, storage: str) -> None:
    if not storage.startswith(PROXY):
        kind = storage.partition(":")[0]
        reason = (
            "is a file on this machine, which pods cannot reach"
            if kind in ("journal", "sqlite")
            else "has a password, which would be written to the manifest"
        )
        raise SpaceError(
            f"the study's storage, {kind}, {reason}: serve a database with `tgi-tune storage` and set --storage "
            "grpc://HOST:PORT"
        )
    host = storage.removeprefix(PROXY).rpartition(":")[0]
    if host in LOCAL_HOSTS:
        raise SpaceError(f"--storage is {storage}, an address of this machine only: set an address that pods can reach")
    if config.server.kind == "tgi-docker":
        raise SpaceError(
            "`kind` of the server is tgi-docker, but pods have no docker: use tgi-launcher, with TGI's image for pods"
        )
