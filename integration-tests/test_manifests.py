"""The manifests of deploy/kubernetes have Kubernetes' form, fit together, and start commands that exist."""

import re
from pathlib import Path

import kubernetes_validate
import manifests
import pytest
from dockerfile import stages
from manifests import FIELDS, container, found, launched, pod, words
from pages import commands

from text_generation_common.cluster.endpoints import TcpEndpoint, parse_endpoint
from text_generation_common.cluster.identity import Role
from text_generation_common.flags.cluster import Way

# The oldest version whose schema has every field that the manifests use, and the newest that the package knows.
VERSIONS = ("1.33", kubernetes_validate.latest_version())
FRONTS, ENGINES = found("Deployment", "tgi-fronts"), found("StatefulSet", "tgi-engines")
SINGLE_POD = found("Deployment", "tgi-single")
FRONT, ENGINE, SINGLE = container(FRONTS), container(ENGINES), container(SINGLE_POD)
DOCKER_PAGE = manifests.REPOSITORY / "docs" / "docker.md"
GOLDEN = Path(manifests.REPOSITORY, "router/text_generation_router/metrics/tests/metrics.golden")


@pytest.mark.parametrize(
    "manifest", manifests.manifests(), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}"
)
def test_a_manifest_has_the_form_of_its_kind_and_no_unknown_field(manifest):
    for version in VERSIONS:
        assert kubernetes_validate.validate(manifest, version, strict=True)


def test_an_unknown_field_and_an_unknown_flag_are_noticed():
    wrong = found("Service", "tgi")
    wrong["spec"]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)
    with pytest.raises(AssertionError, match="No such option"):
        launched(["text-generation-launcher", "--engine-adress=x"])


def test_names_of_manifests_are_unique_and_labels_are_those_of_one_deployment():
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests.manifests()]
    assert len(names) == len(set(names)) == 13
    for each in manifests.manifests():
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "tgi"


def test_our_command_line_takes_the_commands_of_both():
    front, engine = launched(words(FRONT)), launched(words(ENGINE))
    assert (front.cluster.way, engine.cluster.way) == (Way.FRONTS, Way.ENGINE)
    assert engine.cluster.engine.engine_address == f"{FIELDS['status.podIP']}:50051"
    # What fronts check of a request and what engines accept has to be equal.
    for group in ("requests", "tokens", "files", "compute"):
        assert getattr(front, group) == getattr(engine, group), group
    assert front.model.model_id == engine.model.model_id


def test_one_gpu_is_asked_for_each_shard():
    for one in (ENGINE, SINGLE):
        assert launched(words(one)).num_shard == one["resources"]["limits"]["nvidia.com/gpu"]


def test_the_single_pod_downloads_into_its_volume_with_the_token_of_its_secret():
    assert launched(words(SINGLE)).cluster.way is Way.ROUTER and "command" not in SINGLE
    [claim] = [each for each in manifests.manifests() if each["kind"] == "PersistentVolumeClaim"]
    [volume] = [each for each in pod(SINGLE_POD)["volumes"] if each["name"] == "data"]
    assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    assert {"name": "data", "mountPath": image_environ()["HF_HOME"]} in SINGLE["volumeMounts"]
    [token] = SINGLE["env"]
    assert token["name"] == "HF_TOKEN" and token["valueFrom"]["secretKeyRef"]["key"] == "HF_TOKEN"
    secrets = [command for command in commands(DOCKER_PAGE, "kubectl create secret generic") if "HF_TOKEN=" in command]
    assert [command.split()[4] for command in secrets] == [token["valueFrom"]["secretKeyRef"]["name"]]


def image_environ():
    return stages()[-1].environ


def ports(one):
    return {port["name"]: port["containerPort"] for port in one["ports"]}


def test_ports_of_commands_containers_services_and_fronts_are_the_same():
    front, engine = launched(words(FRONT)), launched(words(ENGINE))
    listens = parse_endpoint(engine.cluster.engine.engine_address, listens=True)
    asked = parse_endpoint(front.cluster.engine_list.engines_dns)
    assert isinstance(listens, TcpEndpoint) and isinstance(asked, TcpEndpoint)
    assert ports(ENGINE) == {"engine": listens.port, "metrics": engine.cluster.engine.engine_metrics_port}
    assert ports(FRONT) == {"http": front.http.port}
    assert ports(SINGLE) == {"http": launched(words(SINGLE)).http.port}
    headless = found("Service", asked.host)
    assert headless["spec"]["clusterIP"] == "None" and ENGINES["spec"]["serviceName"] == asked.host
    assert headless["spec"]["publishNotReadyAddresses"], "else an engine that drains is cut off"
    assert {port["name"]: port["port"] for port in headless["spec"]["ports"]} == ports(ENGINE)
    assert asked.port == listens.port
    for service, one in (("tgi", FRONT), (asked.host, ENGINE), ("tgi-single", SINGLE)):
        for port in found("Service", service)["spec"]["ports"]:
            assert port["targetPort"] in ports(one)


def test_probes_ask_ports_and_routes_that_exist():
    for one in (FRONT, ENGINE, SINGLE):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = one[probe].get("httpGet") or one[probe]["tcpSocket"]
            assert asked["port"] in ports(one)
            assert asked.get("path", "/health") in ("/health", "/live")
        assert one["readinessProbe"]["httpGet"]["path"] == "/health"
        assert "/health" not in str(one["livenessProbe"]), "a lost engine or shard must not cost a pod"


@pytest.mark.parametrize(
    ("pods", "one"),
    [(FRONTS, FRONT), (ENGINES, ENGINE), (SINGLE_POD, SINGLE)],
    ids=["front", "engine", "single"],
)
def test_a_pod_has_the_time_that_its_requests_get_to_end(pods, one):
    paused = one.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    patience = launched(words(one)).http.graceful_termination_timeout
    assert pod(pods)["terminationGracePeriodSeconds"] >= paused + patience + 10


@pytest.mark.parametrize(
    ("pods", "one", "role"), [(FRONTS, FRONT, Role.FRONT), (ENGINES, ENGINE, Role.ENGINE)], ids=["front", "engine"]
)
def test_a_pod_gets_the_certificate_of_its_role_alone_readable_by_its_user_alone(pods, one, role):
    volumes = {volume["name"]: volume for volume in pod(pods)["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in one["volumeMounts"]}
    secret = mounts[launched(words(one)).cluster.security.tls_dir]["secret"]
    assert secret == {"secretName": f"tgi-{role}", "defaultMode": 0o400}
    assert [volume for volume in volumes.values() if "secret" in volume] == [volumes["certificates"]]
    assert launched(words(one)).model.model_id in mounts


@pytest.mark.parametrize("one", [FRONT, ENGINE, SINGLE], ids=["front", "engine", "single"])
def test_containers_have_no_rights_that_they_do_not_need(one):
    context = one["securityContext"]
    assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert {"mountPath": "/tmp", "name": "tmp"} in one["volumeMounts"]


def test_selectors_select_the_pods_that_they_are_for():
    fronts, engines, single = "Deployment/tgi-fronts", "StatefulSet/tgi-engines", "Deployment/tgi-single"
    expected = {"tgi": fronts, "tgi-fronts": fronts, "tgi-engines": engines, "tgi-single": single}
    for each in manifests.manifests():
        if each["kind"] == "PersistentVolumeClaim":
            continue
        spec, name = each["spec"], each["metadata"]["name"]
        if each["kind"] == "HorizontalPodAutoscaler":
            target = spec["scaleTargetRef"]
            assert f"{target['kind']}/{target['name']}" == expected[name]
            continue
        selector = spec["podSelector"] if each["kind"] == "NetworkPolicy" else spec["selector"]
        assert list(manifests.selected(selector.get("matchLabels", selector))) == [expected[name]]


def test_engines_are_reached_by_fronts_and_their_metrics_by_the_monitoring():
    rules = found("NetworkPolicy", "tgi-engines")["spec"]["ingress"]
    [fronts], [monitoring] = (rule["from"] for rule in rules)
    assert list(manifests.selected(fronts["podSelector"]["matchLabels"])) == ["Deployment/tgi-fronts"]
    assert list(fronts) == ["podSelector"], "pods of this namespace only"
    assert monitoring["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    assert [[port["port"] for port in rule["ports"]] for rule in rules] == [["engine"], ["metrics"]]
    [out, _] = found("NetworkPolicy", "tgi-fronts")["spec"]["egress"]
    assert out["ports"] == [{"protocol": "TCP", "port": ports(ENGINE)["engine"]}]


def test_autoscaling_follows_a_metric_that_engines_export():
    [metric] = found("HorizontalPodAutoscaler", "tgi-engines")["spec"]["metrics"]
    exported = set(re.findall(r"^# TYPE (\S+) gauge$", GOLDEN.read_text(), re.MULTILINE))
    assert metric["pods"]["metric"]["name"] in exported
