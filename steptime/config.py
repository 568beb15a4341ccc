"""The base of every class a config file is read into."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Frozen, and deaf to nothing: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
