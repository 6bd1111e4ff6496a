"""The wheel of gdn is the command: the library is gdn-kernels', which it needs in the same version.
An editable install has both, from the tree.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NeedsKernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            kernels = f"gdn-kernels=={self.metadata.version}"
            build_data["dependencies"].append(kernels)
