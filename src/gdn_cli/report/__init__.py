"""Records -> what a person reads or a program does. Nothing else in gdn makes text of results."""

from __future__ import annotations

from .profile import show_profile_list, show_profiles
from .screen import console, progress, put, say, show_json
from .terminal import show, show_doctor, show_list, show_proof, show_remote, show_workloads
from .tune import show_tuning

__all__ = [
    "console",
    "progress",
    "put",
    "say",
    "show",
    "show_doctor",
    "show_json",
    "show_list",
    "show_profile_list",
    "show_profiles",
    "show_proof",
    "show_remote",
    "show_tuning",
    "show_workloads",
]
