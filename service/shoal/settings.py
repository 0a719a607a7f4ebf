"""Where the client finds its server and its token. The only reader of the environment in this package."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ClientSettings(BaseSettings):
    """Read from SHOAL_SERVER, SHOAL_TOKEN and SHOAL_DATA_DIR."""

    model_config = SettingsConfigDict(env_prefix="SHOAL_", frozen=True, extra="ignore")

    server: str = Field(default="http://127.0.0.1:8700", description="Address of the control plane.")
    token: str | None = Field(default=None, description="The administrator's token; default: that in data_dir.")
    data_dir: Path = Field(
        default=Path("~/.shoal"), description="Where a control plane on this machine keeps its token."
    )

    def find_token(self) -> str | None:
        """SHOAL_TOKEN, else what stands in data_dir/admin.token, else None."""
        if self.token:
            return self.token
        try:
            return (self.data_dir.expanduser() / "admin.token").read_text(encoding="ascii").strip() or None
        except OSError:
            return None
