"""What grpcurl can do, through reflection: generate, health and server info, with no file of the project on the client.

Its equal here is `reflecting_client.py`, in an interpreter that cannot import the project.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from cluster import Cluster
from report import Report

CLIENT = Path(__file__).parent / "reflecting_client.py"
ALIKE = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
TIMEOUT_S = 120.0
PROMPT = "The capital of France is"
ANSWER_TOKENS = 8
SERVING = [{"status": "SERVING"}]


def run(report: Report) -> None:
    """Everything by reflection, the workers' addresses too."""
    with Cluster(prefill=1, decode=1) as cluster:
        router = Server(cluster.router)
        check_server(report, "router", router, "paceline.v1.Router")
        check_generate(report, router)
        check_error(report, router)
        [loads] = router.call("paceline.v1.Router/GetLoads")
        workers = {worker["info"]["role"]: worker["info"]["address"] for worker in loads["workers"]}
        report.equal("workers that the router names", sorted(workers), ["ROLE_DECODE", "ROLE_PREFILL"])
        for role, service in (("ROLE_PREFILL", "paceline.v1.Prefill"), ("ROLE_DECODE", "paceline.v1.Decode")):
            info = check_server(report, service.rpartition(".")[2], Server(workers[role]), service)
            report.equal(f"{role}: role in its server info", info.get("role"), role)
            report.equal(f"{role}: processes in its server info", len(info.get("processIds", ())), 2)


class Server:
    """One gRPC server, of which nothing is known but the address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def services(self) -> set[str]:
        """What it serves, by its own word."""
        return set(self._client().stdout.split())

    def call(self, method: str, request: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """All answers. Raises RuntimeError for a status that is not OK."""
        done = self._client(method, json.dumps(request or {}))
        if done.returncode != 0:
            raise RuntimeError(f"{method} at {self._address}: {done.stderr}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def refusal(self, method: str, request: dict[str, Any]) -> str:
        """The status, and its message, of a call that fails; empty where it does not."""
        return self._client(method, json.dumps(request)).stderr

    def _client(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        return subprocess.run(
            [sys.executable, "-I", "-S", str(CLIENT), ":".join(sorted(folders)), self._address, *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={},
        )


def check_server(report: Report, name: str, server: Server, service: str) -> dict[str, Any]:
    """What all three kinds have in common; returns the server info."""
    report.equal(f"{name}: services", sorted(server.services()), sorted({service, *ALIKE}))
    report.equal(f"{name}: health", server.call("grpc.health.v1.Health/Check"), SERVING)
    of_service = server.call("grpc.health.v1.Health/Check", {"service": service})
    report.equal(f"{name}: health of {service}", of_service, SERVING)
    [answer] = server.call(f"{service}/GetServerInfo")
    info: dict[str, Any] = answer["server"]
    report.note(f"{name}: version, model", f"{info.get('version')}, {info.get('model')}")
    report.equal(f"{name}: version and model are given", bool(info.get("version") and info.get("model")), True)
    return info


def check_generate(report: Report, router: Server) -> None:
    """A text and a chat, streamed."""
    sampling = {"maxTokens": ANSWER_TOKENS, "temperature": 0, "ignoreEos": True}
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    for kind, prompt in (("text", PROMPT), ("chat", chat)):
        pieces = router.call("paceline.v1.Router/Generate", {kind: prompt, "sampling": sampling})
        text = "".join(piece.get("text", "") for piece in pieces)
        finish = pieces[-1].get("finish", {})
        report.contains(f"generate from {kind}", text, "Paris")
        report.equal(
            f"generate from {kind}: tokens", sum(len(each.get("tokenIds", ())) for each in pieces), ANSWER_TOKENS
        )
        report.at_least(f"generate from {kind}: pieces of the stream", len(pieces), 3)
        report.equal(f"generate from {kind}: end", finish.get("reason"), "FINISH_REASON_LENGTH")
        report.contains(f"generate from {kind}: computed by", str(finish.get("prefillWorker")), "prefill-0")


def check_error(report: Report, router: Server) -> None:
    """A mistake is told by status and message."""
    refused = router.refusal("paceline.v1.Router/Generate", {"text": PROMPT, "sampling": {"temperature": -1}})
    report.contains("a temperature of -1", refused.strip(), "INVALID_ARGUMENT", "temperature", "-1")
