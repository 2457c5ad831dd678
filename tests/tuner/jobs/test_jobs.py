"""Load workers and study workers as Kubernetes Jobs, checked against the published schemas."""

import shutil
import subprocess
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from loadgen.config.bench_config import BenchConfig
from loadgen.config.parsing import load as parsed
from loadgen.errors import UsageError
from tests.support.kubernetes import check_manifest
from tuner.config import TuneConfig
from tuner.errors import SpaceError
from tuner.jobs.job_manifest import JobManifest
from tuner.jobs.load_jobs import load_jobs
from tuner.jobs.study_jobs import study_jobs
from tuner.servers.select import server_of
from tuner.study.artefacts import load_toml

LOAD = parsed(BenchConfig, {"concurrency": 8, "duration": 5.0, "api_key_env": "SERVER_KEY"})
STORAGE = "grpc://storage.tuning:13000"


def of_load(load: BenchConfig = LOAD, workers: int = 3) -> dict[str, str]:
    return load_jobs(load, load_toml(load, "s"), "http://vllm:8000", workers, "org/tgi-bench:1")


def of_study(storage: str = STORAGE, **server: object) -> dict[str, str]:
    config = TuneConfig.model_validate({"server": {"profile": "vllm", "model_id": "org/m", **server}})
    return study_jobs("chat", config, storage, 2, "org/tuner:1")


def manifests(files: dict[str, str]) -> dict[str, dict]:
    kustomization = yaml.safe_load(files["kustomization.yaml"])
    return {name: yaml.safe_load(files[name]) for name in kustomization["resources"]}


@pytest.mark.parametrize("files", [of_load(), of_study(), of_study(gpus=[0, 1])], ids=["load", "study", "gpus"])
def test_servers_7_manifests_match_the_published_schemas(files: dict[str, str]):
    for content in manifests(files).values():
        check_manifest(content)


def test_the_exported_deployment_matches_the_published_schemas():
    config = TuneConfig.model_validate({"server": {"profile": "vllm", "model_id": "org/m", "gpus": [0]}})

    for content in yaml.safe_load_all(server_of(config.server).export("k8s", {"max_num_seqs": 16}, ["found"])):
        check_manifest(content)


def test_an_unknown_field_and_a_wrong_type_are_errors():
    job = manifests(of_load())["workers.yaml"]

    for change in ({"completion": 3}, {"completions": "3"}):
        with pytest.raises(jsonschema_rs.ValidationError):
            check_manifest({**job, "spec": {**job["spec"], **change}})


def test_the_workers_join_the_master_with_the_key_of_a_secret():
    found = manifests(of_load())

    master, workers, service = (found[name] for name in ("master.yaml", "workers.yaml", "service.yaml"))
    command = container(master)["command"]
    assert command[command.index("--expect-workers") + 1] == "3"
    assert command[command.index("--url") + 1] == "http://vllm:8000"
    assert workers["spec"]["completions"] == workers["spec"]["parallelism"] == 3
    host, port = container(workers)["command"][-1].split(":")
    assert host == service["metadata"]["name"]
    assert int(port) == service["spec"]["ports"][0]["port"] == container(master)["ports"][0]["containerPort"]
    assert service["spec"]["selector"] == master["spec"]["template"]["metadata"]["labels"]
    join_key = {"secretKeyRef": {"name": "tgi-bench-join", "key": "TGI_BENCH_JOIN_KEY"}}
    assert {each["name"]: each["valueFrom"] for each in container(workers)["env"]} == {"TGI_BENCH_JOIN_KEY": join_key}
    assert [each["name"] for each in container(master)["env"]] == ["TGI_BENCH_JOIN_KEY", "SERVER_KEY"]


def test_the_masters_load_file_is_the_load():
    files = of_load()
    kustomization = yaml.safe_load(files["kustomization.yaml"])

    assert kustomization["configMapGenerator"] == [{"name": "tgi-bench-load", "files": ["load.toml"]}]
    assert "concurrency = 8" in files["load.toml"]
    assert "Assumes that pods reach http://vllm:8000" in files["kustomization.yaml"]


def test_study_workers_share_a_storage_and_no_node():
    worker = manifests(of_study(gpus=[0, 1]))["workers.yaml"]

    assert container(worker)["command"] == ["tgi-tune", "worker", "--study", "chat", "--storage", STORAGE]
    assert container(worker)["resources"]["limits"] == {"nvidia.com/gpu": 2}
    affinity = worker["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert (
        worker["spec"]["template"]["metadata"]["labels"]["app"]
        in term["labelSelector"]["matchExpressions"][0]["values"]
    )


def test_commands_and_paths_of_the_study_are_allowed_and_named():
    files = of_study(command="vllm serve {model} --port {port}", model_id="/models/m")

    assert container(manifests(files)["workers.yaml"])["command"][-1] == "--allow-command"
    assert "# Assumes that the image contains server.model_id = /models/m." in files["kustomization.yaml"]
    assert "# Assumes that the image contains server.command = vllm serve" in files["kustomization.yaml"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"storage": "journal"}, "the study's storage, journal, is a file on this machine"),
        ({"storage": "sqlite:x.db"}, "the study's storage, sqlite, is a file on this machine"),
        ({"storage": "postgresql://me:hunter@db/s"}, "has a password, which would be written to the manifest"),
        ({"storage": "grpc://127.0.0.1:13000"}, "an address of this machine"),
        ({"profile": None, "kind": "tgi-docker"}, "pods have no docker"),
    ],
)
def test_a_study_that_pods_cannot_join_is_refused(change: dict, message: str):
    with pytest.raises(SpaceError, match=message) as refused:
        of_study(**change)

    assert "hunter" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "workers", "message"),
    [
        ({"api_key": "k"}, 2, "`api_key` of the load is a secret and would be written to the manifest"),
        ({"header": ["X-Key=k"]}, 2, "`header` of the load is a secret and would be written to the manifest"),
        ({}, 9, "`concurrency` is 8 but 9 workers share it"),
    ],
)
def test_a_load_with_secrets_or_too_many_workers_is_refused(change: dict, workers: int, message: str):
    load = parsed(BenchConfig, {"concurrency": 8, **change})

    with pytest.raises((SpaceError, UsageError), match=message):
        of_load(load, workers)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on PATH")
@pytest.mark.parametrize("files", [of_load(), of_study()], ids=["load", "study"])
def test_kustomize_builds_the_folder(files: dict[str, str], tmp_path: Path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    built = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=60)

    assert built.returncode == 0, built.stderr
    kinds = [each["kind"] for each in yaml.safe_load_all(built.stdout)]
    assert set(kinds) - {"ConfigMap"} == {each["kind"] for each in manifests(files).values()}
    assert ("ConfigMap" in kinds) == ("load.toml" in files)


def container(job: dict) -> dict:
    (only,) = job["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize("url", ["http://me:hunter-1@vllm:8000", "http://vllm:8000/?token=hunter-1"])
def test_hardening_S4_a_url_with_a_secret_is_not_written_to_a_manifest(url: str):
    with pytest.raises(SpaceError, match="api_key_env") as refused:
        load_jobs(LOAD, load_toml(LOAD, "s"), url, 2, "org/tgi-bench:1")

    assert "hunter" not in str(refused.value)


def test_hardening_S5_kubernetes_replaces_no_variable_in_a_command():
    job = JobManifest("a", "org/a:1", ("run", "--url", "http://h/$(SERVER_KEY)")).content()

    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == ["run", "--url", "http://h/$$(SERVER_KEY)"]
