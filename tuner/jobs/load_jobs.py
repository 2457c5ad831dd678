"""Kubernetes manifests of a distributed load: a master, its Service, the workers, and a volume for the runs."""

from loadgen.config.bench_config import BenchConfig
from loadgen.config.distribution import JOIN_KEY_VARIABLE, MASTER_PORT, Distribution
from loadgen.generator.worker_messages import FILE_SETTINGS, LENGTH_SETTINGS
from loadgen.redaction import redacted_text
from loadgen.workloads.lengths import EMPIRICAL
from tuner.errors import SpaceError
from tuner.jobs.job_manifest import FOLDER, JobManifest, SecretVariable
from tuner.jobs.yaml_text import yaml_text
from tuner.servers.exported_text import image_note

MASTER, WORKER = "tgi-bench-master", "tgi-bench-worker"
JOIN_SECRET, API_SECRET = "tgi-bench-join", "tgi-bench-api"
RUNS, LOAD, LOAD_FILE = "tgi-bench-runs", "tgi-bench-load", "load.toml"
# Settings of a load that contain secrets, with the remedy.
SECRETS = {"api_key": "name its variable in `api_key_env`", "header": "leave it out"}
# A worker fails while its master does not listen yet.
RETRIES_OF_A_WORKER = 6


def load_jobs(load: BenchConfig, load_toml: str, url: str, workers: int, image: str) -> dict[str, str]:
    """The files of a kustomization, by name. `load_toml`: content of the load file. Raises UsageError, SpaceError."""
    Distribution(workers, is_open=True).check(load)
    if redacted_text(url) != url:
        raise SpaceError(
            f"`--url` {redacted_text(url)} has a secret, which would be written to the manifest: name the variable "
            "of the server's key in `api_key_env`"
        )
    for name, remedy in SECRETS.items():
        if getattr(load, name):
            raise SpaceError(f"`{name}` of the load is a secret and would be written to the manifest: {remedy}")
    join_key = SecretVariable(JOIN_KEY_VARIABLE, JOIN_SECRET)
    api_key = [SecretVariable(load.api_key_env, API_SECRET)] if load.api_key_env else []
    run = ("tgi-bench", "run", "--config", f"/load/{LOAD_FILE}", "--url", url)
    listen = ("--master", "--master-bind-host", "0.0.0.0", "--master-bind-port", str(MASTER_PORT))
    master = JobManifest(
        MASTER,
        image,
        (*run, *listen, "--expect-workers", str(workers)),
        variables=(join_key, *api_key),
        volumes={
            f"{FOLDER}/runs": {"persistentVolumeClaim": {"claimName": RUNS}},
            "/load": {"configMap": {"name": LOAD}},
        },
        ports=(MASTER_PORT,),
    )
    worker = JobManifest(
        WORKER,
        image,
        ("tgi-bench", "run", "--join", f"{MASTER}:{MASTER_PORT}"),
        pods=workers,
        retries=RETRIES_OF_A_WORKER,
        variables=(join_key,),
    )
    resources = {
        "service.yaml": _service(),
        "master.yaml": master.content(),
        "workers.yaml": worker.content(),
        "runs.yaml": _claim(),
    }
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(resources),
        "configMapGenerator": [{"name": LOAD, "files": [LOAD_FILE]}],
    }
    comments = tuple(_comments(load, url, workers, image))
    files = {"kustomization.yaml": yaml_text(kustomization, comments), LOAD_FILE: load_toml}
    return files | {name: yaml_text(content) for name, content in resources.items()}


def _comments(load: BenchConfig, url: str, workers: int, image: str) -> list[str]:
    secret = f"kubectl create secret generic {JOIN_SECRET} --from-literal={JOIN_KEY_VARIABLE}=$(openssl rand -hex 16)"
    api = (
        [f"kubectl create secret generic {API_SECRET} --from-literal={load.api_key_env}=KEY"]
        if load.api_key_env
        else []
    )
    files = [f"Assumes that the image contains {name} = {value}." for name, value in _files_of(load)]
    return [
        f"A load of {workers} workers on {url}. Before the first run:",
        *(f"  {line}" for line in (secret, *api)),
        "Then: kubectl apply -k . && kubectl wait --for=condition=complete --timeout=1h job/" + MASTER,
        f"A Job runs once. Before the next run: kubectl delete job {MASTER} {WORKER}",
        *image_note(image),
        *files,
        f"Assumes that {image} has tgi-bench on PATH and that user 1000 can write to {FOLDER}.",
        f"Assumes that pods reach {url}, and a default storage class: the runs are in the volume {RUNS}.",
        "Each worker requests one CPU. Workers on the node of the server under test disturb the measurement.",
    ]


def _files_of(load: BenchConfig) -> list[tuple[str, str]]:
    """Name and value of each setting of a load that is a file path."""
    found = [(name, getattr(load, name)) for name in (*FILE_SETTINGS, *LENGTH_SETTINGS, "tokenizer", "ca_file")]
    return [
        (name, str(value))
        for name, value in found
        if value is not None and (name not in LENGTH_SETTINGS or str(value).startswith(f"{EMPIRICAL}:"))
    ]


def _service() -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": MASTER},
        "spec": {
            "selector": {"app": MASTER},
            "publishNotReadyAddresses": True,
            "ports": [{"port": MASTER_PORT, "targetPort": MASTER_PORT}],
        },
    }


def _claim() -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": RUNS},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
