"""A wheel with libraries that `gdn build` made is for one platform."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Prebuilt(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        libraries = Path(self.root).parents[1] / "src" / "gdn" / "prebuilt"
        if any(libraries.rglob("*.so")):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
