"""Where the client finds its server and its token. The only reader of the environment in this package."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from shoal.credentials import read_credentials


class ClientSettings(BaseSettings):
    """Read from SHOAL_SERVER, SHOAL_TOKEN, SHOAL_PROJECT and SHOAL_DATA_DIR."""

    model_config = SettingsConfigDict(env_prefix="SHOAL_", frozen=True, extra="ignore")

    server: str = Field(default="http://127.0.0.1:8700", description="Address of the control plane.")
    token: str | None = Field(
        default=None, description="A token; default: the one of `shoal login`, or the administrator's in data_dir."
    )
    project: str | None = Field(default=None, description="Whose jobs are sent; default: the only one you have.")
    data_dir: Path = Field(
        default=Path("~/.shoal"), description="Where a control plane on this machine keeps its token."
    )

    @property
    def credentials_path(self) -> Path:
        return self.data_dir.expanduser() / "credentials.json"

    def find_server(self) -> str:
        """SHOAL_SERVER, else the one that was signed in to last, else the control plane of this machine."""
        known = None if "server" in self.model_fields_set else read_credentials(self.credentials_path).server
        return (known or self.server).rstrip("/")

    def find_token(self, server: str) -> str | None:
        """SHOAL_TOKEN, else that of `shoal login` for this server, else what stands in data_dir/admin.token, else
        None."""
        found = self.token or read_credentials(self.credentials_path).tokens.get(server)
        if found:
            return found
        try:
            return (self.data_dir.expanduser() / "admin.token").read_text(encoding="ascii").strip() or None
        except OSError:
            return None
