"""The process that runs an algo's code: python -m gdn_cli.worker.executor DESCRIPTOR DEVICE

What serves has its usual name as a module, which `timing.integrity` compares: nothing in
this one is called later.
"""

import sys

from ...machine import linux, sanitizers

linux.end_with_parent()
linux.confine()
sanitizers.spare_children()

from .main import main  # noqa: E402  # imports torch, which takes seconds

main(int(sys.argv[1]), sys.argv[2])
