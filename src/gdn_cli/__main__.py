"""`python -m gdn_cli` is `gdn`, for machines where no script was installed."""

from .cli import main

main()
