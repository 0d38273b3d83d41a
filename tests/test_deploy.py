"""What deploy/ and the Dockerfile say agrees with the program that they start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from structure_kit import ROOT

from worldmove.doctor.ucx import SWITCH
from worldmove.node.service import KEEPER_SOCKET
from worldmove.options import OPTIONS

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
NODES = sorted(name for name in SERVICES if "node" in name)
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def options(name: str) -> dict[str, str]:
    words = SERVICES[name]["command"][1:]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("name", NODES)
def test_nodes_are_started_with_options_that_exist(name: str) -> None:
    assert SERVICES[name]["command"][0] == "serve"
    assert set(options(name)) <= {option.flag for option in OPTIONS}
    variables = set(SERVICES[name]["environment"]) - {"WORLDMOVE_URL"}
    assert variables <= {option.env for option in OPTIONS}
    assert SERVICES[name]["environment"]["WORLDMOVE_URL"] == f"http://{options(name)['--http']}"


@pytest.mark.parametrize("name", NODES)
def test_a_node_waits_for_the_keeper_that_listens_where_it_looks(name: str) -> None:
    node = SERVICES[name]
    ((keeper, condition),) = node["depends_on"].items()
    socket = f"{options(name)['--run-dir']}/{KEEPER_SOCKET}"
    assert condition == {"condition": "service_healthy"}
    assert SERVICES[keeper]["command"] == [socket]
    assert SERVICES[keeper]["healthcheck"]["test"][-1] == socket
    assert (SERVICES[keeper]["image"], SERVICES[keeper]["profiles"]) == (node["image"], node["profiles"])


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_all_share_the_folder_of_sockets_and_the_user(name: str) -> None:
    places = dict(volume.split(":") for volume in SERVICES[name]["volumes"])
    assert places == {"run": "/run/worldmove", "state": "/var/lib/worldmove"}
    user = re.search(r"^USER (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    assert user is not None
    assert SERVICES[name]["user"] == user[1]
    assert SERVICES[name]["build"]["args"]["EXTRAS"] in ("cu13", "host")


def test_what_the_image_copies_is_let_into_the_build() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, flags=re.MULTILINE)
    assert {word for line in copied for word in line.split()} == allowed


def test_the_switch_for_the_systems_ucx_is_the_one_that_the_doctor_looks_at() -> None:
    for path in (Path("deploy/rdma.Dockerfile"), Path("docs/containers.md")):
        assert f"{SWITCH}=true" in (ROOT / path).read_text()
