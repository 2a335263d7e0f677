"""The manifests in deploy/kubernetes/, as far as they can be checked without a cluster.

They are validated against the API's schemas, and every `ratchet` command line is parsed by the real
command.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.helpers.deployed import ROOT, parse

from ratchet.config import Config, load_config
from ratchet.runtime.prepare import check_run
from ratchet.transport.mailbox.credentials import load_token

MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
KUBERNETES = "1.34"


def documents() -> dict[str, dict[str, Any]]:
    """Every document of the manifests, by "Kind/name"."""
    found = [doc for path in MANIFESTS for doc in yaml.safe_load_all(path.read_text())]
    return {f"{doc['kind']}/{doc['metadata']['name']}": doc for doc in found}


def pods() -> dict[str, dict[str, Any]]:
    """The pod template of each workload."""
    workloads = {k: d for k, d in documents().items() if "template" in d.get("spec", {})}
    return {name: doc["spec"]["template"] for name, doc in workloads.items()}


def containers() -> dict[str, dict[str, Any]]:
    return {c["name"]: c for pod in pods().values() for c in pod["spec"]["containers"]}


def expanded(container: dict[str, Any]) -> list[str]:
    """The arguments as the kubelet expands them; a variable that is not defined stays."""
    sample = {"POD_IP": "10.0.0.7", "NODE_RANK": "1", "POD_NAME": "pod-1", "POD_UID": "u-1"}
    defined = {variable["name"] for variable in container["env"]}
    return [
        re.sub(r"\$\((\w+)\)", lambda m: sample[m[1]] if m[1] in defined else m[0], text)
        for text in container["args"]
    ]


@pytest.mark.parametrize("name", documents())
def test_a_manifest_is_valid(name: str) -> None:
    kubernetes_validate.validate(documents()[name], KUBERNETES, strict=True)


def test_every_role_of_a_run_is_there() -> None:
    assert sorted(pods()) == [
        "Deployment/ratchet-rollout",
        "Job/ratchet-head",
        "Job/ratchet-trainer",
    ]
    assert sorted(containers()) == ["buffer", "registry", "rollout", "trainer"]


@pytest.mark.parametrize("name", containers())
def test_a_container_launches_its_role(name: str) -> None:
    call = parse(expanded(containers()[name]))
    assert call["role"].value == name
    assert call["config"] == Path("/etc/ratchet/config.toml")
    assert call["token_file"] == "/run/ratchet/token"
    elsewhere = name in {"trainer", "rollout"}
    assert call["registry"] == ("ratchet-registry:7301" if elsewhere else "10.0.0.7:7301")
    assert call["host"] == (None if name == "registry" else "10.0.0.7")
    assert "$" not in str(call["directory"])


def test_the_trainer_meets_at_its_first_pod() -> None:
    job = documents()["Job/ratchet-trainer"]["spec"]
    call = parse(expanded(containers()["trainer"]))
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == call["num_nodes"]
    assert job["template"]["spec"]["subdomain"] == "ratchet-trainer"
    service = documents()["Service/ratchet-trainer"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"]
    (port,) = containers()["trainer"]["ports"]
    assert call["rendezvous"] == f"ratchet-trainer-0.ratchet-trainer:{port['containerPort']}"
    assert service["ports"][0]["port"] == port["containerPort"]
    rank = next(v for v in containers()["trainer"]["env"] if v["name"] == "NODE_RANK")
    assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]


def test_services_reach_their_pods_and_the_policy_covers_all() -> None:
    every = {"app.kubernetes.io/name": "ratchet"}
    labels = {name: pod["metadata"]["labels"] for name, pod in pods().items()}
    for service, pod in [("registry", "Job/ratchet-head"), ("trainer", "Job/ratchet-trainer")]:
        selector = documents()[f"Service/ratchet-{service}"]["spec"]["selector"]
        assert [name for name in labels if selector.items() <= labels[name].items()] == [pod]
    policy = documents()["NetworkPolicy/ratchet"]["spec"]
    assert policy["podSelector"]["matchLabels"] == every
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": every}}]}]
    assert all(every.items() <= found.items() for found in labels.values())
    port = containers()["registry"]["ports"][0]
    (served,) = documents()["Service/ratchet-registry"]["spec"]["ports"]
    assert (served["port"], served["targetPort"]) == (port["containerPort"], port["name"])


def test_the_registry_is_ready_when_it_answers() -> None:
    command = containers()["registry"]["readinessProbe"]["exec"]["command"]
    assert command[:2] == ["sh", "-c"]
    words = shlex.split(command[2].replace("$POD_IP", "10.0.0.7"))
    assert words[:2] == ["exec", "ratchet"]
    call = parse(words[2:])
    assert call["registry"] == "10.0.0.7:7301"
    assert str(call["token_file"]) == "/run/ratchet/token"


@pytest.mark.parametrize("name", pods())
def test_a_pod_has_what_it_mounts_and_no_rights(name: str) -> None:
    spec = pods()[name]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounted = set()
    for container in [*spec["initContainers"], *spec["containers"]]:
        mounted |= {mount["name"] for mount in container["volumeMounts"]}
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["image"] == "ratchet:0.1.0"
    assert mounted == volumes.keys()
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec["automountServiceAccountToken"]
    for volume in volumes.values():
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            assert f"PersistentVolumeClaim/{claim}" in documents()
    assert f"ConfigMap/{volumes['config']['configMap']['name']}" in documents()


def test_every_pod_makes_the_token_a_private_file_of_its_own(tmp_path: Path) -> None:
    inits = [pod["spec"]["initContainers"] for pod in pods().values()]
    assert all(init == inits[0] for init in inits)
    for pod in pods().values():
        security, volumes = pod["spec"]["securityContext"], pod["spec"]["volumes"]
        # a Secret's files are root's; only the group of fsGroup may read them
        assert security["fsGroup"] == security["runAsGroup"]
        (secret,) = (v["secret"] for v in volumes if "secret" in v)
        assert secret == {"secretName": "ratchet-token", "defaultMode": 0o440}
    given = tmp_path / "..data"
    given.mkdir()
    (given / "token").write_text("a" * 64)
    (given / "token").chmod(0o440)
    (tmp_path / "token").symlink_to(given / "token")
    own = tmp_path / "own"
    own.mkdir()
    places = {"/secret/token": str(tmp_path / "token"), "/run/ratchet/token": str(own / "token")}
    command = [places.get(word, word) for word in inits[0][0]["command"]]
    subprocess.run(command, check=True)
    load_token(str(own / "token"))


def load_manifest_config(path: Path) -> Config:
    text = documents()["ConfigMap/ratchet-config"]["data"]["config.toml"]
    path.write_text(text)
    return load_config(path)


def test_the_configuration_runs(tmp_path: Path) -> None:
    config = load_manifest_config(tmp_path / "config.toml")
    check_run(config)
    replicas = documents()["Deployment/ratchet-rollout"]["spec"]["replicas"]
    assert config.rollout.num_workers == replicas


def test_the_image_is_the_one_that_the_dockerfile_makes() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    tag = re.search(r"-t (\S+)", text)
    assert tag is not None
    assert {c["image"] for c in containers().values()} == {tag[1]}
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    assert all((ROOT / name).exists() for line in copied for name in line.split())
    user = pods()["Job/ratchet-head"]["spec"]["securityContext"]["runAsUser"]
    assert f"USER {user}" in text
