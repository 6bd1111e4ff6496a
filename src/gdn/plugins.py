"""How engines find gdn: entry points of `vllm.general_plugins` and `sglang.srt.plugins`.

Engines call them in all of their processes. Nothing is done, and nothing imported, unless
GDN_SERVE=1, or GDN_SERVE is not set and the engine's own list of plug-ins names gdn.
"""

from __future__ import annotations

import importlib
import logging
import os

from gdn_cli.errors import GdnError

_log = logging.getLogger("gdn.serving")


def vllm() -> None:
    _start("vllm", "VLLM_PLUGINS")


def sglang() -> None:
    _start("sglang", "SGLANG_PLUGINS")


def _start(engine: str, listed_in: str) -> None:
    listed = "gdn" in os.environ.get(listed_in, "").split(",")
    if os.environ.get("GDN_SERVE", "1" if listed else "0") != "1":
        return
    try:
        replaced = importlib.import_module(f"gdn.serving.{engine}").CLIENT.install()
        _log.info("%s: replaced: %s", engine, ", ".join(replaced) or "nothing")
    except GdnError as e:
        _log.warning("%s: gdn replaces nothing: %s", engine, e)
