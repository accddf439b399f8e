"""The manifests against the structure of the operators' resources, and the container file against the repository.

``kubernetes_resources.json`` holds names and types of the fields of the resources that the manifests use, as the
package ``kubeflow_trainer_api`` 2.3.0 declares them for TrainJob, JobSet and Job; what has no fields there is ``any``.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepspeed.cluster import find_cluster_node

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
RESOURCES = json.loads(Path(__file__).with_name("kubernetes_resources.json").read_text(encoding="utf-8"))
SCALARS = {"string": str, "integer": int, "boolean": bool, "number": (int, float)}
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml"))


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def problems(value: Any, kind: Any, path: str) -> list[str]:
    """What of a manifest does not fit the resource that it is."""
    if kind == "any":
        return []
    if isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{path}: expected a list"]
        return [text for number, each in enumerate(value) for text in problems(each, kind[0], f"{path}[{number}]")]
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return [f"{path}: expected an object"]
        return [text for name, each in value.items() for text in problems(each, kind["*"], f"{path}.{name}")]
    if kind in SCALARS:
        fits = isinstance(value, SCALARS[kind]) and (kind == "boolean" or not isinstance(value, bool))
        return [] if fits else [f"{path}: expected {kind}, found {value!r}"]
    resource = RESOURCES[kind]
    if not isinstance(value, dict):
        return [f"{path}: expected {kind}"]
    found = [f"{path}.{name}: missing" for name in resource["required"] if name not in value]
    for name, each in value.items():
        if name in resource["fields"]:
            found += problems(each, resource["fields"][name], f"{path}.{name}")
        else:
            found.append(f"{path}.{name}: no such field of {kind}")
    return found


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_fit_the_resources(name):
    checked = [document for document in documents(name) if document["kind"] in RESOURCES]
    assert checked
    for document in checked:
        assert problems(document, document["kind"], document["kind"]) == []


def test_the_check_finds_what_does_not_fit():
    (job,) = documents("jobset.yaml")
    (node,) = job["spec"]["replicatedJobs"]
    node["template"]["spec"]["completions"] = "2"
    node["template"]["spec"]["complections"] = 2
    del node["name"]
    spec = "JobSet.spec.replicatedJobs[0]"
    assert problems(job, "JobSet", "JobSet") == [
        f"{spec}.name: missing",
        f"{spec}.template.spec.completions: expected integer, found '2'",
        f"{spec}.template.spec.complections: no such field of {'BatchV1JobSpec'}",
    ]


def containers(value):
    if isinstance(value, dict):
        yield from value.get("containers", [])
        for each in value.values():
            yield from containers(each)
    elif isinstance(value, list):
        for each in value:
            yield from containers(each)


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_the_variables_of_the_pods_identify_the_machine(name):
    manifest = documents(name)
    (container,) = containers(manifest)
    by_name = {each["name"]: each for each in container["env"]}
    index = by_name.pop("PET_NODE_RANK")["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    node = find_cluster_node({each["name"]: each["value"] for each in by_name.values()} | {"PET_NODE_RANK": "1"})
    spec = manifest[-1]["spec"]
    spec = spec if name == "job.yaml" else spec["replicatedJobs"][0]["template"]["spec"]
    assert node.count == spec["completions"] == spec["parallelism"]
    assert node.address.split(".")[0].removesuffix("-node-0-0").removesuffix("-0") == manifest[-1]["metadata"]["name"]
    (codes, _) = (rule.get("onExitCodes") for rule in spec["podFailurePolicy"]["rules"])
    assert codes["values"] == [75] and codes["containerName"] == container["name"]
    grace = spec["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > int(container["command"][container["command"].index("--grace") + 1])


def test_the_image_is_made_of_files_that_exist_and_installs_no_compiler():
    text = (FOLDER / "Containerfile").read_text(encoding="utf-8")
    copied = re.findall(r"^COPY (\S+) ", text, re.MULTILINE)
    assert [name for name in copied if not name.startswith("dist/") and not (ROOT / name).is_file()] == []
    assert "dist/deepspeed-*.whl" in copied
    commands = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    assert not re.search(r"\b(gcc|g\+\+|clang|nvcc|build-essential|ninja|cmake)\b", commands)
    assert "--only-binary :all:" in commands


def test_every_manifest_starts_the_script_of_the_image():
    for name in MANIFESTS:
        commands = re.findall(r"command: (\[.*\])", (FOLDER / name).read_text(encoding="utf-8"))
        assert commands and all("train.py" in json.loads(each) for each in commands)
    assert (ROOT / "examples" / "places" / "train.py").is_file()
