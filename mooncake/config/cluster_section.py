"""The cluster's section of the configuration: etcd, through which several Conductors stand by for each other.

Owns: its keys with their types, bounds, defaults and meanings, the conditions between them. Does not know:
files, flags, variables (`mooncake.config.settings`), etcd (`mooncake.leadership`).
"""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from mooncake.config.sections import KEY_PREFIX, URL, Section, split_values

EtcdUrl = Annotated[str, Field(pattern=URL)]


class ClusterConfig(Section):
    """Standby conductors: which conductor leads is decided through your own etcd."""

    etcd_endpoints: Annotated[list[EtcdUrl], BeforeValidator(split_values)] = Field(
        [],
        description="http://host:port or https://host:port of etcd's members, with commas: conductors stand"
        " by for each other, and all nodes learn there which one leads; default: none, the one conductor is"
        " at conductor.endpoint",
    )
    etcd_prefix: str = Field(
        "/mooncake",
        pattern=KEY_PREFIX,
        description="etcd keys of this cluster begin so, and those of no other",
    )
    etcd_lease_s: int = Field(
        2,
        ge=1,
        le=60,
        description="a conductor that etcd does not hear for so long is followed by another one; etcd itself"
        " may have a larger minimum",
    )
    etcd_ca: Path | None = Field(
        None, description="who signs etcd's certificates (PEM); default: whom this host trusts"
    )
    etcd_cert: Path | None = Field(None, description="certificate that is shown to etcd (PEM)")
    etcd_key: Path | None = Field(None, description="the private key of etcd_cert (PEM)")
    etcd_user: str | None = Field(None, min_length=1, description="name at etcd, if it asks for one")
    etcd_password_file: Path | None = Field(None, description="holds the password of etcd_user")

    @property
    def has_standbys(self) -> bool:
        """Whether etcd decides which Conductor leads."""
        return bool(self.etcd_endpoints)

    @model_validator(mode="after")
    def _check_together(self) -> "ClusterConfig":
        if (self.etcd_cert is None) != (self.etcd_key is None):
            raise ValueError("cluster.etcd_cert and etcd_key go together: name both or none")
        if (self.etcd_user is None) != (self.etcd_password_file is None):
            raise ValueError("cluster.etcd_user and etcd_password_file go together: name both or none")
        given = [name for name in ("etcd_ca", "etcd_cert", "etcd_user") if getattr(self, name) is not None]
        if given and not self.etcd_endpoints:
            raise ValueError(f"cluster.{given[0]} has no effect without cluster.etcd_endpoints")
        for url in self.etcd_endpoints:
            if url.startswith("http://") and (self.etcd_ca or self.etcd_cert):
                raise ValueError(
                    f"cluster.etcd_endpoints: {url} is not encrypted, so that etcd_ca and etcd_cert have no"
                    " effect; write https://"
                )
        return self
