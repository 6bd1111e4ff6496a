"""gdn.serving under its old name, for one release."""

import warnings

from gdn.serving import *  # noqa: F403

warnings.warn(
    "gdn_cli.serving is gdn.serving now; 0.2 will not have it here",
    DeprecationWarning,
    2,
)
