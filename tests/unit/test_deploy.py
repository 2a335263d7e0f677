"""What is in deploy/ and the commands in docs/, as far as they can be checked without a cluster.

No Slurm and no Kubernetes here: the batch script runs against a stand-in `srun`, the manifests are
validated against the API's schemas, and every `ratchet` command line is parsed by the real command.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml

from ratchet.cli import app
from ratchet.config import Config, load_config
from ratchet.runtime.prepare import check_run
from ratchet.transport.mailbox.credentials import load_token

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "deploy" / "slurm" / "ratchet.sbatch"
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KUBERNETES = "1.34"


def parse(argv: list[str]) -> dict[str, Any]:
    """Parse a command line of `ratchet` as the command does, without running it."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    context = group.make_context("ratchet", list(argv))
    _, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    assert command is not None
    return command.make_context(argv[0], rest, parent=context).params


# --- Slurm


def test_the_batch_script_is_sound() -> None:
    subprocess.run(["bash", "-n", SBATCH], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, SBATCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


RATCHET = """#!/bin/bash
printf '%s\\n' "$(printf '%q ' "$@")" >> "$FAKES/calls"
role=$2
trap 'echo "$role was told to stop"; echo "$role" >> "$FAKES/stopped"; exit 0' TERM
echo "$role is up"
echo "$role" >> "$FAKES/up"
[[ $role != "${FAILS:-}" ]] || { echo "the run failed: $role: the disk is full"; exit 1; }
while [[ ! -e $FAKES/over ]]; do sleep 0.02; done
echo "$role: the run has ended"
"""
FAKES = {
    "ratchet": RATCHET,
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": "#!/bin/bash\nprintf 'n%s\\n' 1 2 3 4\n",
    "getent": '#!/bin/bash\necho "127.0.0.${2#n} STREAM $2"\n',
    "ip": "#!/bin/bash\necho '2: ib0    inet 10.1.2.3/24 brd 10.1.2.255 scope global ib0'\n",
}


class Job:
    """The batch script, running."""

    def __init__(self, root: Path, *arguments: str, **environment: str) -> None:
        self.fakes = root / "fakes"
        self.fakes.mkdir()
        for name, text in FAKES.items():
            (self.fakes / name).write_text(text)
            (self.fakes / name).chmod(0o755)
        self.state = root / "runs" / "job-7"
        slurm = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-4]",
            "RATCHET_DIR": str(root / "runs"),
        }
        path = {"PATH": f"{self.fakes}:{os.environ['PATH']}", "FAKES": str(self.fakes)}
        own = {"RATCHET_DIR": str(root / "runs"), "GRACE_S": "6", **environment}
        self.process = subprocess.Popen(
            ["bash", SBATCH, *arguments],
            env={**os.environ, **slurm, **path, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def lines(self, name: str) -> list[str]:
        path = self.fakes / name
        return path.read_text().splitlines() if path.exists() else []

    def calls(self) -> dict[str, dict[str, Any]]:
        """The parsed command line of each part, by kind and rank."""
        parsed = [parse(shlex.split(line)) for line in self.lines("calls")]
        return {f"{call['role'].value}-{call['node_rank'] or 0}": call for call in parsed}

    def until(self, condition: Callable[[], bool]) -> None:
        tick = threading.Event()
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            tick.wait(0.02)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    started: list[Job] = []

    def start(*arguments: str, **environment: str) -> Job:
        started.append(Job(tmp_path, *arguments, **environment))
        return started[-1]

    yield start
    for job in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)


def test_a_job_starts_every_role_where_it_belongs(jobs: Callable[..., Job]) -> None:
    job = jobs("copy.toml", "trainer.num_steps=9", TRAINER_NODES="2", ROLLOUTS_PER_NODE="2")
    job.until(lambda: len(job.lines("up")) == 8)
    assert job.state.joinpath("token").stat().st_mode & 0o777 == 0o600
    load_token(str(job.state / "token"))
    (job.fakes / "over").touch()
    code, out, _ = job.end()
    assert (code, out.splitlines()[-1]) == (0, "registry: the run has ended")

    calls = job.calls()
    assert sorted(calls) == [
        "buffer-0",
        "registry-0",
        *(f"rollout-{rank}" for rank in range(4)),
        "trainer-0",
        "trainer-1",
    ]
    for name, call in calls.items():
        assert call["registry"] == "127.0.0.1:7301"
        assert call["token_file"] == str(job.state / "token")
        assert call["overrides"] == ["trainer.num_steps=9"]
        assert call["config"] == Path("copy.toml")
        node = {"trainer-1": 2, "rollout-0": 3, "rollout-1": 3, "rollout-2": 4, "rollout-3": 4}
        assert call["host"] == f"127.0.0.{node.get(name, 1)}"
    for rank in (0, 1):
        assert calls[f"trainer-{rank}"]["num_nodes"] == 2
        assert calls[f"trainer-{rank}"]["rendezvous"] == "127.0.0.1:7302"
    shared = [calls[name]["directory"] for name in ("registry-0", "buffer-0", "trainer-0")]
    assert set(shared) == {job.state / "run"}
    assert len({call["directory"] for call in calls.values()}) == 6


def test_the_first_part_that_fails_ends_the_job_with_its_words(jobs: Callable[..., Job]) -> None:
    job = jobs("copy.toml", FAILS="trainer")
    code, _, err = job.end()
    assert code == 1
    assert err.splitlines()[-1] == (
        "trainer-0 failed with exit code 1: the run failed: trainer: the disk is full"
    )
    assert sorted(job.lines("stopped")) == ["buffer", "registry", "rollout", "rollout", "rollout"]


def test_a_signal_goes_to_every_part(jobs: Callable[..., Job]) -> None:
    job = jobs("copy.toml")
    job.until(lambda: len(job.lines("up")) == 6)
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.end()
    assert (code, err) == (143, "")
    assert len(job.lines("stopped")) == 6


def test_a_job_uses_the_interface_that_it_is_told(jobs: Callable[..., Job]) -> None:
    job = jobs("copy.toml", RATCHET_INTERFACE="ib0")
    job.until(lambda: len(job.lines("up")) == 6)
    (job.fakes / "over").touch()
    assert job.end()[0] == 0
    assert {call["host"] for call in job.calls().values()} == {"10.1.2.3"}


def test_a_job_without_nodes_for_rollouts_is_refused(jobs: Callable[..., Job]) -> None:
    code, _, err = jobs("copy.toml", TRAINER_NODES="4").end()
    assert code == 2
    assert "leave none for rollouts" in err


# --- Kubernetes


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


# --- command lines in documents


def command_lines() -> list[tuple[str, str]]:
    """Every `ratchet ...` line of a code block, with what continues it."""
    found = []
    for path in DOCS:
        for block in re.findall(r"^```(?:\w*)\n(.*?)^```", path.read_text(), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                text = line.strip().removeprefix("$ ").split(" #")[0].rstrip(" &")
                if re.match(r"(\S+=\S+ )*ratchet ", text):
                    found.append((path.name, text[text.index("ratchet ") :]))
    return found


@pytest.mark.parametrize(("document", "line"), command_lines())
def test_a_command_in_a_document_is_one(document: str, line: str) -> None:
    del document
    words = [re.sub(r"\$\{?\w+\}?|\b[A-Z]{1,2}\b", "1", word) for word in shlex.split(line)[1:]]
    assert parse(words) is not None


def test_the_documents_have_commands() -> None:
    assert {"deploy.md", "README.md"} <= {document for document, _ in command_lines()}
