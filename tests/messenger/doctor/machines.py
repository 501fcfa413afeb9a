"""Fake machines that are trees of files, and short functions to write these."""

import dataclasses
import socket
from collections.abc import Iterator, Mapping

from messenger.doctor.findings import Finding
from messenger.doctor.machine import Machine
from mooncake.config.settings import Config

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class FakeMachine(Machine):
    """A machine whose network and commands are given by the test."""

    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hosts: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    addresses: tuple[str, ...] = ("127.0.0.1",)
    outputs: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def run(self, *command: str) -> str | None:
        return self.outputs.get(" ".join(command))

    def resolve(self, host: str) -> list[str]:
        if host not in self.hosts and not host[0].isdecimal() and ":" not in host:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.hosts.get(host, [host])

    def has_address(self, address: str) -> bool:
        return address in (*self.addresses, "0.0.0.0")


def config(**sections: object) -> Config:
    return Config.model_validate(sections)


def only(findings: Iterator[Finding] | list[Finding]) -> Finding:
    (finding,) = findings
    return finding
