"""`python -m gdn_cli` is `gdn`, for machines where no script was installed."""

from .commands import main

main()
